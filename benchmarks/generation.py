"""Tokens a second of greedy generation: a ``DecoderLM``'s own, and that of transformers with the same weights.

In: nothing. Out: a table, and ``results/generation_<date>.json``. Both sides continue the same prompts, in turns in one
process, and must write the same ids. No token ends a text, so each has the same length; of several prompts each has
another one, for which transformers fills rows up on the left. Accepted: at least ``LIMIT`` times transformers' tokens
a second, of a tiny model alone and with eight prompts, and of 90 M parameters.

    python benchmarks/generation.py [--threads 1] [--rounds 9]

Exit status: 1 if a row is significantly (the whole confidence interval) below the limit, otherwise 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shared.record import RESULTS, interval, write_result
from shared.timing import Block, Stopwatch

from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.decoder_lm.family import DecoderLM, TextInferencer
from unigen_ds.inference.prompts import Prompt
from unigen_ds.runner.open.answers import answer_all

LIMIT = 1.2
COMMON = {"model_type": "llama", "max_position_embeddings": 512}
TINY = {**COMMON, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 4_900}
LARGE = {**COMMON, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE |= {"num_key_value_heads": 4, "vocab_size": 19_200, "tie_word_embeddings": True}
ROWS = {"tiny, 1 prompt": (TINY, 1, 128), "tiny, 8 prompts": (TINY, 8, 128), "90 M, 1 prompt": (LARGE, 1, 64)}
"""Sizes, prompts, new tokens of each."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Ids = list[list[int]]


class Numbers:
    """A tokenizer without words, of which no id is the end; its texts are lists of ids."""

    bos_id, pad_id, image_start_id, image_end_id, eos_id, fingerprint = 0, 0, 0, 0, -1, "numbers"

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> list[int]:
        return ids


def sides(sizes: Mapping[str, Any], prompts: Ids, new_tokens: int) -> dict[str, Callable[[], Ids]]:
    """Functions that return the new ids of each prompt."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = DecoderLM(llm=sizes).to(DEVICE).eval().requires_grad_(False)
    own: Any = model.transformers_model
    theirs = AutoModelForCausalLM.from_config(own.config.__class__(**own.config.to_dict()), attn_implementation="sdpa")
    theirs.load_state_dict(own.state_dict())
    theirs.to(DEVICE).eval().requires_grad_(False)
    inferencer = TextInferencer(model, UnifiedProcessor(Numbers()))  # type: ignore[arg-type]
    longest = 1 + max(map(len, prompts))  # both begin with the token 0
    rows = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (longest - len(ids) - 1) + [1] * (len(ids) + 1) for ids in prompts], device=DEVICE)

    def ours() -> Ids:
        asked = [(0, Prompt(" ".join(map(str, ids)))) for ids in prompts]
        options = {"max_length": new_tokens, "temperature": 0.0, "top_p": 1.0, "flow": None}
        made: list[Any] = [*answer_all(inferencer, asked, **options)]
        return [answer.text for answer in made]

    def transformers() -> Ids:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids: Any = theirs.generate(rows, attention_mask=mask, **options)
        return ids[:, longest:].tolist()  # type: ignore[no-any-return]

    return {"ours": ours, "transformers": transformers}


def measure(sizes: Mapping[str, Any], num_prompts: int, new_tokens: int, *, rounds: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 4_000, (8 + 3 * n,), generator=random).tolist() for n in range(num_prompts)]
    both, blocks = sides(sizes, prompts, new_tokens), dict[str, list[Block]]()
    ids = {name: write() for name, write in both.items()}  # warm-up
    assert ids["ours"] == ids["transformers"], "not the same ids"
    for turn in range(rounds):
        for name in [*both][:: 1 if turn % 2 else -1]:
            watch = Stopwatch()
            both[name]()
            blocks.setdefault(name, []).append(watch.block(0.0))
    ours, theirs = blocks["ours"], blocks["transformers"]
    pairs = [*zip(theirs, ours, strict=True)]
    return {
        "milliseconds_per_pass": {
            name: interval([1e3 * block.wall / new_tokens for block in each]) for name, each in blocks.items()
        },
        "tokens_per_second": {
            name: num_prompts * new_tokens / interval([block.wall for block in each])["median"]
            for name, each in blocks.items()
        },
        "ratio": {kind: interval([getattr(a, kind) / getattr(b, kind) for a, b in pairs]) for kind in ("wall", "cpu")},
    }


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'':18}{'ours, tokens/s':>16}{'transformers':>14}{'ours is faster by (95 %)':>28}{'CPU time':>10}")
    for name, result in results.items():
        speed, ratio = result["tokens_per_second"], result["ratio"]
        wall = "{median:.2f} ({low:.2f} - {high:.2f})".format(**ratio["wall"])
        print(f"{name:18}{speed['ours']:16.0f}{speed['transformers']:14.0f}{wall:>28}{ratio['cpu']['median']:10.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=1, help="torch threads; default: 1")
    p.add_argument("--rounds", type=int, default=9, help="turns of each side")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = p.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    load_before = os.getloadavg()
    results = {name: measure(*row, rounds=arguments.rounds) for name, row in ROWS.items()}
    show(results)
    accepted = {name: result["ratio"]["wall"]["high"] >= LIMIT for name, result in results.items()}
    record = {
        "limit": LIMIT,
        "models": {"tiny": TINY, "90 M": LARGE},
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "verdict": accepted,
        "results": results,
    }
    print(f"Written: {os.path.relpath(write_result('generation', record, folder=arguments.out))}")
    return int(not all(accepted.values()))


if __name__ == "__main__":
    sys.exit(main())
