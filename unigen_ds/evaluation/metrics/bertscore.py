"""BERTScore by torchmetrics, with a local model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.log import logger
from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, package, text_pairs
from unigen_ds.evaluation.metrics.local_model import LocalModel, exact

_KINDS = ("precision", "recall", "f1")


@METRICS.register_module()
class BERTScore(Metric):
    """Similarity of the words' embeddings, -1 to 1 (Zhang et al., ICLR 2020), without baseline and idf.

    Of several references the best counts. A sample with an empty prediction or reference counts 0, with a warning.

    Args:
        path: folder of the model, as transformers' ``AutoModel`` and ``AutoTokenizer`` read it.
        layer: whose output is compared; None: the last. Values of different layers cannot be compared.
        batch_size: texts at a time; changes rounding only.
        device: of the model; None: this process's CUDA device, or the CPU.
    """

    name = "bertscore"
    library = "torchmetrics"

    def __init__(
        self,
        *,
        path: str,
        layer: Annotated[int, Ge(1)] | None = None,
        batch_size: Annotated[int, Ge(1)] = 16,
        device: str | None = None,
    ) -> None:
        super().__init__(layer=layer)
        self._local = LocalModel(path, where="BERTScore.path", device=device)
        self._layer, self._batch_size = layer, batch_size

    def check(self) -> None:
        super().check()
        self._local.check()

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        pairs = text_pairs(predictions, references, keys)
        flat = [(n, one, each) for n, (one, several) in enumerate(pairs) for each in several]
        scored = [(n, one, each) for n, one, each in flat if one.strip() and each.strip()]
        if len(scored) < len(flat):
            logger().warning(
                "BERTScore: %d of %d pairs have an empty text and count 0", len(flat) - len(scored), len(flat)
            )
        rows = np.zeros((len(pairs), len(_KINDS)))
        if scored:
            found = self._scores([one for _, one, _ in scored], [each for _, _, each in scored])
            of_sample = np.asarray([n for n, _, _ in scored])
            for n in set(of_sample.tolist()):
                rows[n] = found[of_sample == n].max(0)
        return rows.tolist()

    def _scores(self, predictions: list[str], references: list[str]) -> np.ndarray:
        """Shape (pairs, 3)."""
        model, tokenizer = self._local.model, self._local.tokenizer
        limit = min(int(tokenizer.model_max_length), _positions(model))
        layers = int(getattr(model.config, "num_hidden_layers", 0))
        if self._layer is not None and layers and self._layer > layers:
            raise ConfigError(f"BERTScore.layer is {self._layer}", allowed=f"1 to {layers}, the layers of the model")
        long = [text for text in {*predictions, *references} if len(tokenizer(text)["input_ids"]) > limit]
        if long:
            logger().warning(
                "BERTScore: %d texts are longer than the model's %d tokens and are truncated", len(long), limit
            )

        def tokens(texts: list[str], **_: Any) -> Any:  # torchmetrics asks for padding to the limit: 512 vectors a text
            return tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")

        with exact():
            found = package("torchmetrics.functional.text").bert_score(
                predictions,
                references,
                model=model,
                user_tokenizer=tokens,
                num_layers=self._layer,
                batch_size=self._batch_size,
                device=self._local.device,
            )
        return np.stack([np.asarray(found[kind], dtype=np.float64).reshape(-1) for kind in _KINDS], axis=-1)

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {f"{self.name}_{kind}": float(mean) for kind, mean in zip(_KINDS, table.mean(0), strict=True)}

    def details(self) -> dict[str, str]:
        return {"model": f"{self._local.name} {self._local.model_hash}", "precision": "model float32, mean float64"}


def _positions(model: Any) -> int:
    """The longest text of a model; RoBERTa's first position is the one after its padding token's id."""
    unused = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    return int(getattr(model.config, "max_position_embeddings", 512)) - (0 if unused is None else int(unused) + 1)
