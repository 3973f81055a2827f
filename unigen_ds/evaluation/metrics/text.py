"""Metrics of texts, each by its library: BLEU, ROUGE, METEOR, BERTScore; and perplexity, of the losses of texts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from unigen_ds.config.registry import METRICS
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.metrics.base import Metric, State, TextMetric, package, text_pairs
from unigen_ds.evaluation.metrics.local_model import LocalModel, exact
from unigen_ds.system.log import logger

Kind = Literal["rouge1", "rouge2", "rouge3", "rougeL", "rougeLsum"]


@METRICS.register_module()
class BLEU(TextMetric):
    """BLEU of the corpus, 0 to 100 (Papineni et al., ACL 2002), as sacrebleu computes it (Post, WMT 2018).

    A row is the lengths and the counts of n-grams of one sample; their sums are those of the corpus.

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
        self._max_order, self._smoothing = max_order, smoothing
        self._library: Any = None
        self._warned = False

    def row(self, prediction: str, references: Sequence[str]) -> Sequence[float]:
        if self._library is None:
            self._library = package("sacrebleu").BLEU(
                tokenize=self.settings["tokenize"],
                lowercase=self.settings["lowercase"],
                max_ngram_order=self._max_order,
                smooth_method="none",  # counts as they are; ``values`` smooths their sums
                effective_order=True,  # of sentences; without it sacrebleu logs a warning for each
            )
        score = self._library.sentence_score(prediction, references)
        return [score.sys_len, score.ref_len, *score.counts, *score.totals]

    def compute(self, merged: State) -> dict[str, float]:
        short = sum(row[0] < self._max_order for row in merged["rows"])
        if short and not self._warned:
            self._warned = True
            logger().warning(
                "BLEU: %d of %d answers have fewer than %d words, so none of their %d-grams can match; where all are so"
                " short, BLEU is 0. Remedy: ExactMatch or ROUGE for short answers, or BLEU(max_order=...).",
                short, len(merged["rows"]), self._max_order, self._max_order,
            )  # fmt: skip
        return super().compute(merged)

    def values(self, table: np.ndarray) -> dict[str, float]:
        sums = [int(one) for one in table.sum(0)]
        score = package("sacrebleu").BLEU.compute_bleu(
            correct=sums[2 : 2 + self._max_order],
            total=sums[2 + self._max_order :],
            sys_len=sums[0],
            ref_len=sums[1],
            smooth_method=self._smoothing,
            max_ngram_order=self._max_order,
        )
        return {self.name: float(score.score)}


@METRICS.register_module()
class ROUGE(TextMetric):
    """Mean F-measure of ROUGE, 0 to 1 (Lin, 2004), as Google's rouge-score computes it for a sample.

    rougeLsum splits a text at newlines: put one sentence on each line. Of several references the best counts.

    Args:
        kinds: which to compute.
        use_stemmer: compare words without their endings (Porter's stemmer).
    """

    name = "rouge"
    library = "rouge-score"

    def __init__(
        self, *, kinds: Sequence[Kind] = ("rouge1", "rouge2", "rougeL", "rougeLsum"), use_stemmer: bool = False
    ) -> None:
        super().__init__(kinds=list(kinds), use_stemmer=use_stemmer)
        self._kinds = list(kinds)
        self._scorer: Any = None

    def row(self, prediction: str, references: Sequence[str]) -> Sequence[float]:
        if self._scorer is None:
            scorer = package("rouge_score.rouge_scorer").RougeScorer
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
            raise ConfigError(
                "METEOR needs Java, and there is no command java",
                remedy="install a Java runtime (Debian: default-jre-headless)",
            )

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        return text_pairs(predictions, references, keys)

    def table(self, rows: Sequence[Any]) -> np.ndarray:
        """A text for each sample: its statistics, of which Java computes scores of any samples together."""
        if self._java is None or self._java.meteor_p.poll() is not None:
            self.check()
            self._java = package("pycocoevalcap.meteor.meteor").Meteor()
        try:
            statistics = [self._java._stat(_line(one), [*map(_line, several)]) for one, several in rows]
        except BrokenPipeError as error:
            raise self._ended() from error
        if not all(statistics):
            raise self._ended()
        return np.asarray(statistics)

    def values(self, table: np.ndarray) -> dict[str, float]:
        """Java answers with the score of each sample and then with that of all, as in ``Meteor.compute_score``."""
        java = self._java.meteor_p
        try:
            java.stdin.write((" ||| ".join(["EVAL", *table]) + "\n").encode())
            java.stdin.flush()
            *_, score = [float(java.stdout.readline()) for _ in range(len(table) + 1)]
        except (BrokenPipeError, ValueError) as error:
            raise self._ended() from error
        return {self.name: score}

    def _ended(self) -> ConfigError:
        _, errors = self._java.meteor_p.communicate()
        lines = errors.decode(errors="replace").strip().splitlines()
        return ConfigError(
            f"METEOR's Java program ended: {lines[0] if lines else f'status {self._java.meteor_p.returncode}'}",
            remedy="it needs 2 GiB of memory; the next evaluation starts it again",
        )


def _line(text: str) -> str:
    """A text on one line of the program's protocol, in which ||| separates texts."""
    return " ".join(text.splitlines()).replace("|||", "").replace("  ", " ")


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
    _kinds = ("precision", "recall", "f1")

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
        nonempty = [(n, one, each) for n, one, each in flat if one.strip() and each.strip()]
        if len(nonempty) < len(flat):
            empty = len(flat) - len(nonempty)
            logger().warning("BERTScore: %d of %d pairs have an empty text and count 0", empty, len(flat))
        rows = np.zeros((len(pairs), len(self._kinds)))
        if nonempty:
            numbers, ours, theirs = zip(*nonempty, strict=True)
            scores = self._scores(list(ours), list(theirs))
            for n in set(numbers):
                rows[n] = scores[np.asarray(numbers) == n].max(0)
        return rows.tolist()

    def _scores(self, predictions: list[str], references: list[str]) -> np.ndarray:
        """Shape (pairs, 3)."""
        model, tokenizer = self._local.model, self._local.tokenizer
        limit = min(int(tokenizer.model_max_length), _positions(model))
        layers = int(getattr(model.config, "num_hidden_layers", 0))
        if self._layer is not None and layers and self._layer > layers:
            raise ConfigError(f"BERTScore.layer is {self._layer}", allowed=f"1 to {layers}, the layers of the model")
        long = sum(len(tokenizer(text)["input_ids"]) > limit for text in {*predictions, *references})
        if long:
            logger().warning("BERTScore: %d texts are longer than the model's %d tokens and are truncated", long, limit)

        def tokens(texts: list[str], **_: Any) -> Any:  # torchmetrics asks for padding to the limit: 512 vectors a text
            return tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")

        with exact():
            scores = package("torchmetrics.functional.text").bert_score(
                predictions,
                references,
                model=model,
                user_tokenizer=tokens,
                num_layers=self._layer,
                batch_size=self._batch_size,
                device=self._local.device,
            )
        return np.stack([np.asarray(scores[kind], dtype=np.float64).reshape(-1) for kind in self._kinds], axis=-1)

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {f"{self.name}_{kind}": float(mean) for kind, mean in zip(self._kinds, table.mean(0), strict=True)}

    def details(self) -> dict[str, str]:
        return self._local.details()


def _positions(model: Any) -> int:
    """The longest text of a model; RoBERTa's first position is the one after its padding token's id."""
    unused = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    return int(getattr(model.config, "max_position_embeddings", 512)) - (0 if unused is None else int(unused) + 1)


@METRICS.register_module()
class Perplexity(Metric):
    """exp of the mean loss of a target token over all samples (Jelinek et al., 1977); every token counts the same.

    A prediction is the sum of the cross entropies of a sample's target tokens in nats, its reference their number.
    """

    name = "perplexity"
    predicts = "loss"
    compares = "targets"

    def __init__(self) -> None:
        super().__init__()

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        for loss, targets, key in zip(predictions, references, keys, strict=True):
            if not math.isfinite(loss) or targets < 0:
                problem = f"sample {key!r}: the loss is {loss} over {targets} targets"
                raise DataError(problem, allowed="a finite sum, and a count")
        return [[float(loss), float(targets)] for loss, targets in zip(predictions, references, strict=True)]

    def values(self, table: np.ndarray) -> dict[str, float]:
        loss, targets = table.sum(0)
        if targets == 0:
            raise DataError("perplexity: no sample has a target token")
        return {self.name: float(np.exp(loss / targets))}
