"""Metrics of texts: BLEU, ROUGE, METEOR and BERTScore by their libraries; exact match; perplexity, of losses."""

from __future__ import annotations

import re
import shutil
import string
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from unigen_ds.config.registry import METRICS
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.metrics.base import (
    BATCH_SIZE,
    EXTRA,
    LocalModel,
    Metric,
    device,
    exact_arithmetic,
    text_pairs,
)
from unigen_ds.system.log import logger
from unigen_ds.system.machine import import_optional

package = partial(import_optional, install=EXTRA)
"""A module of an optional package, by its name and that of the metric."""


@METRICS.register_module()
class BLEU(Metric):
    """BLEU of the corpus, 0 to 100 (Papineni et al., ACL 2002), as sacrebleu computes it (Post, WMT 2018).

    Args:
        tokenize: tokenizer of sacrebleu.
        lowercase: compare without upper and lower case.
        max_order: longest n-gram.
        smoothing: of sacrebleu, for orders without a match.
    """

    name = "bleu"
    library = "sacrebleu"

    def __init__(
        self,
        *,
        tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a",
        lowercase: bool = False,
        max_order: Annotated[int, Ge(1)] = 4,
        smoothing: Literal["exp", "floor", "add-k", "none"] = "exp",
    ) -> None:
        super().__init__(tokenize=tokenize, lowercase=lowercase, max_order=max_order, smoothing=smoothing)

    def compute(self, rows: Sequence[Any]) -> dict[str, float]:
        settings, order = self.settings, self.settings["max_order"]
        library = package("sacrebleu", "BLEU").BLEU(
            tokenize=settings["tokenize"],
            lowercase=settings["lowercase"],
            max_ngram_order=order,
            smooth_method=settings["smoothing"],
        )
        texts = [prediction for prediction, _ in rows]
        short = sum(len(library.tokenizer(text).split()) < order for text in texts)
        if short:
            logger().warning(
                "BLEU: %d of %d answers have fewer than %d words, so none of their %d-grams can match; where all are so"
                " short, BLEU is 0. Remedy: ExactMatch or ROUGE for short answers, or BLEU(max_order=...).",
                short, len(texts), order, order,
            )  # fmt: skip
        columns = zip_longest(*(references for _, references in rows))  # sacrebleu skips the None of a shorter list
        return {self.name: float(library.corpus_score(texts, [*columns]).score)}


@METRICS.register_module()
class ROUGE(Metric):
    """Mean F-measure of ROUGE, 0 to 1 (Lin, 2004), as Google's rouge-score computes it for a sample.

    rougeLsum splits a text at newlines: put one sentence on each line. Of several references the best counts.

    Args:
        use_stemmer: compare words without their endings (Porter's stemmer).
    """

    name = "rouge"
    library = "rouge-score"
    _kinds = ("rouge1", "rouge2", "rougeL", "rougeLsum")

    def __init__(self, *, use_stemmer: bool = False) -> None:
        super().__init__(use_stemmer=use_stemmer)
        self._scorer: Any = None

    def row(self, prediction: str, references: Sequence[str]) -> Sequence[float]:
        if self._scorer is None:
            scorer = package("rouge_score.rouge_scorer", "ROUGE").RougeScorer
            self._scorer = scorer(self._kinds, use_stemmer=self.settings["use_stemmer"], split_summaries=False)
        scores = self._scorer.score_multi(references, prediction)
        return [scores[kind].fmeasure for kind in self._kinds]

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {kind: float(table[:, n].mean()) for n, kind in enumerate(self._kinds)}


@METRICS.register_module()
class METEOR(Metric):
    """METEOR 1.5 of the corpus, 0 to 1 (Denkowski and Lavie, 2014), by pycocoevalcap's ``Meteor``, a Java program.

    Of several references the best counts. The program is started on the first process by the first evaluation (10
    seconds or more, up to 2 GiB) and kept for later ones.
    """

    name = "meteor"
    library = "pycocoevalcap"

    def __init__(self) -> None:
        super().__init__()
        self._java: Any = None

    def check(self) -> None:
        super().check()
        if shutil.which("java") is None:
            remedy = "install a Java runtime (Debian: default-jre-headless)"
            raise ConfigError("METEOR needs Java, and there is no command java", remedy=remedy)

    def compute(self, rows: Sequence[Any]) -> dict[str, float]:
        """Raises ``ConfigError`` where the program cannot be started, or ends meanwhile."""

        def line(text: str) -> str:  # of the program's protocol, in which ||| separates texts
            return " ".join(text.splitlines()).replace("|||", "").replace("  ", " ")

        if self._java is None or self._java.meteor_p.poll() is not None:
            self.check()
            self._java = package("pycocoevalcap.meteor.meteor", "METEOR").Meteor()
        references = {n: [*map(line, several)] for n, (_, several) in enumerate(rows)}
        try:
            score, _ = self._java.compute_score(references, {n: [line(one)] for n, (one, _) in enumerate(rows)})
        except (BrokenPipeError, ValueError) as error:
            self._java.lock.release()  # its own method raises while it holds it
            _, errors = self._java.meteor_p.communicate()
            why = errors.decode(errors="replace").strip() or f"status {self._java.meteor_p.returncode}"
            remedy = "it needs 2 GiB of memory; the next evaluation starts it again"
            raise ConfigError(f"METEOR's Java program ended: {why}", remedy=remedy) from error
        return {self.name: float(score)}


@METRICS.register_module()
class BERTScore(Metric):
    """Similarity of the words' embeddings, -1 to 1 (Zhang et al., ICLR 2020), without baseline and idf.

    Of several references the best counts. A sample with an empty prediction or reference counts 0, with a warning.

    Args:
        path: folder of the model, as transformers' ``AutoModel`` and ``AutoTokenizer`` read it.
        layer: whose output is compared; None: the last. Values of different layers cannot be compared.
    """

    name = "bertscore"
    library = "torchmetrics"
    local: LocalModel
    _kinds = ("precision", "recall", "f1")

    def __init__(self, *, path: str, layer: Annotated[int, Ge(1)] | None = None) -> None:
        super().__init__(layer=layer)
        self.local, self._layer = LocalModel(path, where="BERTScore.path"), layer

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        samples = text_pairs(predictions, references, keys)
        pairs = [(n, one, each) for n, (one, several) in enumerate(samples) for each in several]
        nonempty = [(n, one, each) for n, one, each in pairs if one.strip() and each.strip()]
        if len(nonempty) < len(pairs):
            empty = len(pairs) - len(nonempty)
            logger().warning("BERTScore: %d of %d pairs have an empty text and count 0", empty, len(pairs))
        rows = np.zeros((len(samples), len(self._kinds)))
        if nonempty:
            numbers, ours, theirs = zip(*nonempty, strict=True)
            scores = self._scores(list(ours), list(theirs))
            for n in set(numbers):
                rows[n] = scores[np.asarray(numbers) == n].max(0)
        return rows.tolist()

    def _scores(self, predictions: list[str], references: list[str]) -> np.ndarray:
        """Shape (pairs, 3)."""
        model, tokenizer = self.local.model, self.local.tokenizer
        layers = int(getattr(model.config, "num_hidden_layers", 0))
        if self._layer is not None and layers and self._layer > layers:
            raise ConfigError(f"BERTScore.layer is {self._layer}", allowed=f"1 to {layers}, the layers of the model")
        # RoBERTa's first position is after it
        padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
        positions = getattr(model.config, "max_position_embeddings", 512) - (0 if padding is None else padding + 1)
        limit = min(int(tokenizer.model_max_length), int(positions))
        self.local.warn_of_truncated(tokenizer, {*predictions, *references}, limit)

        def tokens(texts: list[str], **_: Any) -> Any:  # torchmetrics asks for padding to the limit: 512 vectors a text
            return tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")

        with exact_arithmetic():
            scores = package("torchmetrics.functional.text", "BERTScore").bert_score(
                predictions, references, model=model, user_tokenizer=tokens, num_layers=self._layer,
                batch_size=BATCH_SIZE, device=device(),
            )  # fmt: skip
        return np.stack([np.asarray(scores[kind], dtype=np.float64).reshape(-1) for kind in self._kinds], axis=-1)

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {f"{self.name}_{kind}": float(mean) for kind, mean in zip(self._kinds, table.mean(0), strict=True)}


@METRICS.register_module()
class Perplexity(Metric):
    """exp of the mean loss of a text's target token, ``val/loss/text`` (Jelinek et al., 1977)."""

    name = "perplexity"
    predicts = "loss"
    compares = "nothing"

    def __init__(self) -> None:
        super().__init__()

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {self.name: float(np.exp(table.mean()))}


@METRICS.register_module()
class ExactMatch(Metric):
    """The share of predictions that equal a reference, 0 to 1.

    Args:
        normalize: ``none`` compares the texts as they are; ``squad`` first removes case, punctuation, English articles
            and repeated spaces, as the official script of SQuAD does (Rajpurkar et al., EMNLP 2016).
    """

    name = "exact_match"

    def __init__(self, *, normalize: Literal["none", "squad"] = "none") -> None:
        super().__init__(normalize=normalize)
        self._normal = _squad if normalize == "squad" else str

    def row(self, prediction: str, references: Sequence[str]) -> Sequence[float]:
        return [float(self._normal(prediction) in map(self._normal, references))]


def _squad(text: str) -> str:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())
