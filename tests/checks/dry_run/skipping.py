"""A user's model that leaves a part out where a micro-batch has nothing for it: sharded, its run would hang."""

from __future__ import annotations

from torch import Tensor

from tests.plugin.data import RowsBatch
from tests.plugin.family import RowsNetwork
from unigen_ds.config.registry import MODELS
from unigen_ds.core.batch import LossTerms


@MODELS.register_module()
class SkippingNetwork(RowsNetwork):
    """As ``RowsNetwork``, without its second layer for rows of which no label is known."""

    has_labels = True

    def forward(self, batch: RowsBatch) -> LossTerms:
        self.has_labels = bool((~batch.labels.isnan()).any())
        return super().forward(batch)

    def predict(self, inputs: Tensor) -> Tensor:
        first, second = self.layers
        inputs = first(inputs)
        return self.head(second(inputs) if self.has_labels else inputs)
