"""What a user would write himself: data, models and hooks of the engine tests. Imported by every worker process."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mmengine.hooks
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from tests.end_to_end.engines.jobs.cases import OWN_RECORDS
from tests.support import full_disk
from unigen_ds.checkpoint import saver, store
from unigen_ds.checks.memory.counted import CountedBytes
from unigen_ds.config.registry import FAMILIES, HOOKS, MODELS
from unigen_ds.core.batch import LossTerms, PackedBatch
from unigen_ds.core.errors import SaveError
from unigen_ds.core.shards import tied_names
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.families.bagel.family import Bagel
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.models.vae import FluxAutoencoder
from unigen_ds.system import dist
from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.outputs import write_output

NUM_RECORDS = 104
"""13 updates of 8 sequences an epoch, so a run of 20 crosses into the second."""


def write_mixed(folder: Path) -> Path:
    """Real digits, uneven on purpose: of 13 records 8 are text of 2 to 20 words, 3 draw an image, 2 describe one."""
    digits = write_digits(folder / "digits")
    draw = (digits / "train_draw.jsonl").read_text(encoding="utf-8").splitlines()
    caption = (digits / "train_caption.jsonl").read_text(encoding="utf-8").splitlines()
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    lines = []
    for i in range(NUM_RECORDS):
        if i % 13 < 8:
            spoken = [words[(i * 7 + k * (i % 5 + 1)) % 10] for k in range(1 + (i * 5) % 19)]
            turns = [
                {"role": "user", "type": "text", "content": f"this is {spoken[0]}"},
                {"role": "assistant", "type": "text", "content": " ".join(spoken)},
            ]
            lines.append(json.dumps({"conversations": turns}))
        else:
            lines.append((draw if i % 13 < 11 else caption)[i])
    (digits / "held.jsonl").write_text("\n".join(lines[13:26]) + "\n", encoding="utf-8")
    (digits / "few.jsonl").write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
    path = digits / "mixed.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parts(folder: Path, *, side: int = 8, patch: int = 4, channels: int = 1) -> None:
    """A language model in two files (fp32 and bf16, tied head) and a vision tower, as others publish them."""
    llm = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    vit = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": side, "patch_size": patch, "num_channels": channels,
    }  # fmt: skip
    torch.manual_seed(7)
    state = UnifiedModel(llm=llm, vit=vit, vae={"type": "PixelAutoencoder", "channels": 1}).state_dict()
    text = {n.removeprefix("language_model."): t for n, t in state.items() if n.startswith("language_model.model.")}
    text = {n: t for n, t in text.items() if "_moe_gen" not in n and "_norm." not in n}
    vit_state = {n.removeprefix("vit_model."): t for n, t in state.items() if n.startswith("vit_model.")}
    patches = "vision_model.embeddings.patch_embedding.weight"
    vit_state[patches] = vit_state[patches].unflatten(1, (patch, patch, channels)).permute(0, 3, 1, 2).contiguous()
    vit_state["vision_model.head.probe"] = torch.ones(3)
    files = {
        "llm/model-00001-of-00002.safetensors": {n: t for n, t in text.items() if "layers.1." not in n},
        "llm/model-00002-of-00002.safetensors": {n: t.bfloat16() for n, t in text.items() if "layers.1." in n},
        "vit/model.safetensors": vit_state,
    }
    for name, tensors in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / name)
    (folder / "llm" / "config.json").write_text(json.dumps(llm), encoding="utf-8")
    vit["num_hidden_layers"] += 1  # one more than BAGEL reads
    (folder / "vit" / "config.json").write_text(json.dumps(vit), encoding="utf-8")


def write_rows(path: Path) -> None:
    """Rows of ``tests/plugin``: three inputs, a value, a label; some targets are unknown."""
    random = torch.Generator().manual_seed(5)
    lines = []
    for number, (a, b, c) in enumerate((torch.rand(192, 3, generator=random) * 4 - 2).tolist()):
        value = a * b - c
        row = [a, b, c, None if number % 5 == 2 else value, None if number % 7 == 3 else int(value > 0)]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines), encoding="utf-8")


class OwnDataset:
    """A user's own map-style data set, in the form that ``DatasetAdapter`` takes: drawn anew whenever it is asked."""

    def __len__(self) -> int:
        return OWN_RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [1, *torch.randint(6, 16, (2 + index % 5,)).tolist()]
        image = torch.rand(1, 8, 8) * 2 - 1 if index % 3 == 0 else None
        return {"input_ids": ids, "labels": ids, "padded_images": image}


@MODELS.register_module()
class FaultyModel(UnifiedModel):
    """The first micro-batch of update ``bad_update`` has a loss that is not finite, on rank ``bad_rank`` alone."""

    def __init__(self, *, bad_update: int, bad_rank: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.bad = (bad_update, bad_rank)
        self.present = (0, 0)
        """(update, micro-batch), told by ``FaultHook``."""

    def forward(self, batch: PackedBatch) -> LossTerms:
        terms = super().forward(batch)
        if self.present != (self.bad[0], 0) or dist.rank() != self.bad[1]:
            return terms
        return LossTerms({name: value * float("nan") for name, value in terms.sums.items()})


@HOOKS.register_module()
class FaultHook(Hook):
    def before_train_iter(self, run: Run, index: int, batch: PackedBatch) -> None:
        for module in run.backend.model.modules():
            if isinstance(module, FaultyModel):
                module.present = (run.progress.updates + 1, index)


@MODELS.register_module()
class OddModel(nn.Module):
    """Odd widths, a tied head, a frozen tower, a buffer that training changes, a parameter of the root."""

    WIDTH, INNER = 13, 31

    def __init__(self, *, vocab: int = 40) -> None:
        super().__init__()
        self.vocab_size = vocab
        self.emb = nn.Embedding(vocab, self.WIDTH)
        self.frozen = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, self.WIDTH)).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(self.WIDTH, self.INNER), nn.GELU(), nn.Linear(self.INNER, self.WIDTH))
        self.connector = nn.Linear(self.WIDTH, self.WIDTH)
        self.image_head = nn.Linear(self.WIDTH, 4)
        self.head = nn.Linear(self.WIDTH, vocab, bias=False)
        self.head.weight = self.emb.weight
        self.mix = nn.Parameter(torch.eye(self.WIDTH) + 0.1)  # the model's own, in none of its modules
        self.register_buffer("gain", torch.tensor([0.5, 1.5, 2.5]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @staticmethod
    def processor_sizes(config: Mapping[str, Any]) -> dict[str, int]:
        return {
            "vit_patch_size": 2, "vit_max_patches_per_side": 4, "latent_channels": 1, "latent_patch_size": 2,
            "vae_spatial_downsample": 1, "max_latent_size": 4,
        }  # fmt: skip

    def shard_units(self) -> list[nn.Module]:
        return [self.frozen, self.block]

    def forward(self, batch: PackedBatch) -> LossTerms:
        if self.training:
            self.calls += 1
        text = self.emb(batch.text_ids)
        dtype = text.dtype
        hidden = torch.zeros(batch.num_tokens, self.WIDTH, dtype=dtype, device=text.device)
        hidden = hidden.index_add(0, batch.text_index, text)
        hidden = hidden.index_add(0, batch.latent_index, self.connector(self.frozen(batch.flow_noise.to(dtype))))
        hidden = hidden + self.block(hidden) * self.gain[1].to(dtype)
        hidden = hidden @ self.mix
        logits = self.head(hidden[batch.text_target_index])
        losses = F.cross_entropy(logits.float(), batch.text_target_ids, reduction="none")
        pixels = self.image_head(hidden[batch.image_target_index])
        noise = batch.flow_noise[torch.isfinite(batch.timesteps)].flip(-1)
        image = (pixels.float() - noise).square().mean(-1).sum()
        return LossTerms({"text": (losses * batch.text_target_weight).sum(), "image": image})


@FAMILIES.register_module()
class OddFamily(Bagel):
    model = OddModel
    published = ()


@HOOKS.register_module()
class RecordHook(Hook):
    """What each micro-batch of a rank held after which start; and on rank 0 the weights, at begin and end."""

    start = 0

    def before_train(self, run: Run) -> None:
        self.start = run.progress.updates
        if run.progress.updates == 0:
            self._write(run, "initial.safetensors")

    def after_train(self, run: Run) -> None:
        self._write(run, "final.safetensors")

    @staticmethod
    def _write(run: Run, file: str) -> None:
        backend = run.backend
        shards = [*backend.master_shards(), *backend.frozen_shards()]
        own = [(s.name, s.shape, s.flat_start, s.data.float().clone()) for s in shards if s.primary]
        if (all_pieces := dist.gather_to_main(own)) is None:
            return
        shapes = {name: shape for of_rank in all_pieces for name, shape, *_ in of_rank}
        state = {name: torch.empty(math.prod(shape)) for name, shape in shapes.items()}
        for name, _, start, data in (piece for of_rank in all_pieces for piece in of_rank):
            state[name][start : start + data.numel()] = data
        module = getattr(backend.model, "module", backend.model)
        state = {name: tensor.view(shapes[name]) for name, tensor in state.items()}
        state |= {alias: state[first].clone() for alias, first in tied_names(module).items()}
        state |= {name: buffer.contiguous().clone() for name, buffer in backend.buffers().items()}
        save_file(state, run.work_dir / file)

    def before_train_iter(self, run: Run, index: int, batch: PackedBatch) -> None:
        images = len(batch.vit_lengths) + len(batch.latent_shapes)
        line = {
            "update": run.progress.updates + 1, "index": index, "images": images, "tokens": batch.num_tokens,
            "samples": batch.sample_ids, "text_targets": batch.text_target_index.numel(), "begun": self.start,
        }  # fmt: skip
        with (run.work_dir / f"record_{dist.rank()}.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


@HOOKS.register_module()
class EncodeHook(Hook):
    """Per rank, after the last update: what the autoencoder makes of one picture, and its weights as they lie there."""

    def after_train(self, run: Run) -> None:
        vae = next(module for module in run.backend.model.modules() if isinstance(module, FluxAutoencoder))
        draw = torch.Generator().manual_seed(0)
        picture = torch.rand((1, 3, 16, 12), generator=draw) * 2 - 1
        noise = torch.randn((1, vae.latent_channels, 8, 6), generator=draw)
        with torch.no_grad():
            tensors = {"latents": vae.encode(picture, noise), **vae.state_dict()}
        save_file(tensors, run.work_dir / f"autoencoder_{dist.rank()}.safetensors")


@HOOKS.register_module()
class SaveAtOnceHook(Hook):
    """Saves what was loaded; elements that fill up DeepSpeed's flat buffers are anything: here NaN."""

    def before_train(self, run: Run) -> None:
        if run.progress.updates:
            loaded = [(shard.data, shard.data.clone()) for shard in run.backend.master_shards()]
            for flat in getattr(run.backend, "_flats", list)():
                flat.detach().fill_(torch.nan)
            for data, former in loaded:
                data.copy_(former)
            run.save_checkpoint("loaded.pth")


ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE, errno.EDQUOT)


@HOOKS.register_module()
class FullDiskHook(Hook):
    """Saves while the N-th change of the disk by one rank fails, for every N and rank, until none fails; errors take
    turns. ``faults.json``: each attempt. With ``async_save`` calls of the last rank's writer fail.
    """

    def __init__(self, *, at_update: int) -> None:
        self.at_update = at_update

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if run.progress.updates == self.at_update:
            if run.config["default_hooks"]["checkpoint"].get("async_save"):
                attempts = [self._of_writer(run, dist.world_size() - 1)]
            else:
                attempts = [attempt for rank in range(dist.world_size()) for attempt in self._attempts(run, rank)]
            if dist.is_main():
                (run.work_dir / "faults.json").write_text(json.dumps(attempts), encoding="utf-8")

    def _attempts(self, run: Run, rank: int) -> Iterator[dict[str, Any]]:
        number, failure, kind = 0, "first", ERRORS[0]
        saver._THREADS = 1  # the N-th call is the same one in every attempt
        while kind:
            number += 1
            kind = ERRORS[number % len(ERRORS)] if failure else 0  # in the end one whose writes are short
            if dist.is_main():  # else the journals' flushes would be among the counted calls of some attempts alone
                for hook in run.hooks:
                    hook.sync()
            if dist.rank() == rank:
                full_disk.arm(run.work_dir, number, lasting=number % 2 == 0, error=kind)
            error, path = "", None
            try:
                path = run.save_checkpoint("try.pth")
            except SaveError as save_error:
                error = str(save_error)
            failure = full_disk.disarm() if dist.rank() == rank else ""
            failure = "".join(dist.gather_objects(failure))
            errors = dist.gather_objects(error)
            files = sorted(p.name for p in run.work_dir.iterdir() if ".pth" in p.name)
            dist.barrier()
            if path is not None and dist.is_main():
                store.verify_manifest(path)
                store.delete(path)
            yield {"rank": rank, "errno": kind, "failed": failure, "errors": errors, "left": files}

    def _of_writer(self, run: Any, rank: int) -> dict[str, Any]:
        error = ""
        if dist.rank() == rank:
            os.environ["FULL_DISK"] = f"9 {errno.EIO} {run.work_dir}"
        run.save_checkpoint("try.pth", background=True)
        os.environ.pop("FULL_DISK", None)
        try:
            run.finish_save(wait=True)
        except SaveError as save_error:
            error = str(save_error)
        run._writer._stop()  # its calls would fail from now on
        return {"errors": dist.gather_objects(error), "left": [*map(str, run.work_dir.glob("*.pth*"))]}


@HOOKS.register_module()
class StructureHook(Hook):
    """Per rank, at the end: sharding units, the piece of every weight held here, graphs of ``torch.compile``."""

    def after_train(self, run: Run) -> None:
        modules = run.backend.model.named_modules()
        structure = {
            "units": [name for name, module in modules if isinstance(module, FSDPModule)],
            "pieces": {s.name: [s.flat_start, s.flat_stop] for s in run.backend.master_shards()},
            "graphs": int(counters["stats"]["unique_graphs"]),
        }
        (run.work_dir / f"structure_{dist.rank()}.json").write_text(json.dumps(structure), encoding="utf-8")


class RunnerSeen(mmengine.hooks.Hook):
    """Written for mmengine: what the runner shows in each micro-batch, in ``seen_<rank>.jsonl``; the last rank alone
    asks for a checkpoint, in the second, and stops the training, in the fifth.
    """

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        hub = runner.message_hub
        record = {
            "iter": runner.iter, "epoch": runner.epoch, "max_iters": runner.max_iters, "rank": runner.rank,
            "hub": [hub.get_info("iter"), hub.get_info("max_iters"), hub.get_scalar("train/lr").current()],
            "lr": runner.optim_wrapper.get_lr()["lr"], "batch_idx": batch_idx, "of": runner.world_size,
            "outputs": {key: float(value) for key, value in outputs.items()},
            "parameters": sum(1 for _ in runner.model.parameters()), "length": len(runner.train_dataloader),
        }  # fmt: skip
        with Path(runner.work_dir, f"seen_{runner.rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if runner.iter == 1 and runner.rank == runner.world_size - 1:
            runner.save_checkpoint(runner.work_dir, "mine.pth")
        if runner.iter == 4 and runner.rank == runner.world_size - 1:
            runner.train_loop.stop_training = True


@HOOKS.register_module()
class StepsHook(Hook):
    """A line of ``steps_<rank>.jsonl`` for each update, of each step count ``[value, dtype, devices, fused]``."""

    def after_update(self, run: Run, result: UpdateResult) -> None:
        optimizer: Any = run.backend._zero.optimizer  # type: ignore[attr-defined]
        steps = [
            [float(optimizer.state[flat]["step"]), str(optimizer.state[flat]["step"].dtype),
             str(optimizer.state[flat]["step"].device), str(flat.device), bool(group["fused"])]
            for group in optimizer.param_groups for flat in group["params"]
        ]  # fmt: skip
        with (run.work_dir / f"steps_{dist.rank()}.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([run.progress.updates, steps]) + "\n")


@HOOKS.register_module()
class KillHook(Hook):
    """SIGKILL for the whole job, when the last rank is in the middle of an update, between its two micro-batches; or,
    with ``saving``, in the middle of the save of that update: it has written one file (``half_saved.json``).
    """

    def __init__(self, *, at_update: int, saving: bool = False) -> None:
        self.at_update, self.saving = at_update, saving

    def before_train_iter(self, run: Run, index: int, batch: PackedBatch) -> None:
        if not self.saving and run.progress.updates + 1 == self.at_update and index == 1 and self._is_last:
            os.killpg(0, signal.SIGKILL)

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        if self.saving and run.progress.updates == self.at_update and self._is_last:
            saver.write_output = self._write_and_die  # type: ignore[assignment]

    @property
    def _is_last(self) -> bool:
        return dist.rank() == dist.world_size() - 1

    def _write_and_die(self, directory: Path, output: Any, **options: Any) -> None:
        write_output(directory, output, **options)
        names = sorted(path.name for path in directory.rglob("*") if path.is_file())
        text = json.dumps([directory.name, names])
        write_text_atomic(directory.parent / "half_saved.json", text)  # a save writes several files at a time
        os.killpg(0, signal.SIGKILL)


@HOOKS.register_module()
class MemoryHook(Hook):
    """Counts the bytes of all live tensors of this rank and writes them to ``memory_<rank>.json``: ``parameters`` after
    ``prepare`` (masters, low-precision copies), ``optimizer`` (what the first step adds); of update 3, less what is
    alive after update 2, gradients before the second micro-batch (``sharded``) and before the step (``gradients``), and
    weights that stay ``gathered`` between forward and backward pass.
    """

    def __init__(self) -> None:
        self.alive: dict[str, int] = {}

    def before_train(self, run: Run) -> None:
        self.alive["prepared"] = live_bytes(run)
        step = run.backend.step

        def count_step() -> Any:
            if run.progress.updates == 2:
                self.alive["before_step"] = live_bytes(run)
            return step()

        run.backend.step = count_step  # type: ignore[method-assign]
        backward = run.backend.backward

        def gather_backward(loss: Tensor) -> None:
            if run.progress.updates == 2:
                self.alive.setdefault("before_backward", live_bytes(run))
            backward(loss)

        run.backend.backward = gather_backward  # type: ignore[method-assign]

    def before_train_iter(self, run: Run, index: int, batch: PackedBatch) -> None:
        if run.progress.updates == 2 and index == 0:
            self.alive["before_forward"] = live_bytes(run)
        if run.progress.updates == 2 and index == 1:
            self.alive["before_second"] = live_bytes(run)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if run.progress.updates <= 2:
            self.alive[f"after_{run.progress.updates}"] = live_bytes(run)

    def after_train(self, run: Run) -> None:
        a = self.alive
        model = list(run.backend.model.parameters())
        counts = {
            "parameters": a["prepared"],
            "optimizer": a["after_2"] - a["prepared"],
            "sharded": a["before_second"] - a["after_2"],
            "gradients": a["before_step"] - a["after_2"],
            "gathered": a["before_backward"] - a["before_forward"],
            "trainable": sum(logical_numel(p) for p in model if p.requires_grad),
            "frozen": sum(logical_numel(p) for p in model if not p.requires_grad),
        }
        (run.work_dir / f"memory_{dist.rank()}.json").write_text(json.dumps(counts), encoding="utf-8")


@HOOKS.register_module()
class CountedBytesHook(Hook):
    """Counts the bytes of all tensors of this rank, operation by operation, and writes ``counted_<rank>.json``: the
    highest sum of the updates, and the sum between two of them.

    Updates after the first are the same, and the least of them counts: on a busy machine gloo's threads release what
    they exchanged a moment too late.
    """

    def before_train(self, run: Run) -> None:
        self.peaks: list[int] = []
        self.counted = CountedBytes()
        gc.collect()
        self.counted.add_all(one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter))
        self.counted.__enter__()

    def before_update(self, run: Run) -> None:
        self.counted.begin()

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.peaks.append(self.counted.peak)
        self.held = self.counted.now

    def after_train(self, run: Run) -> None:
        self.counted.__exit__(None, None, None)
        counts = {"peak": max(self.peaks[0], min(self.peaks[1:])), "held": self.held}
        (run.work_dir / f"counted_{dist.rank()}.json").write_text(json.dumps(counts), encoding="utf-8")


def logical_numel(parameter: Tensor) -> int:
    """Elements of the whole parameter, whatever part of it is here (ZeRO-3 says it in ``ds_numel``)."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def live_bytes(run: Run) -> int:
    """The least of a few counts: on a busy machine gloo's threads release what they exchanged a moment too late."""
    counts = [_counted_bytes(run)]
    for _ in range(2):
        time.sleep(0.05)
        counts.append(_counted_bytes(run))
    return min(counts)


def _counted_bytes(run: Run) -> int:
    """Bytes of the storages of all tensors that Python can reach, each storage once; data batches left out."""
    gradients = [parameter.grad for parameter in run.backend.model.parameters()]
    for module in run.backend.model.modules():
        if isinstance(module, FSDPModule):  # whole gradients that wait for their reduction
            group = module._get_fsdp_state()._fsdp_param_group
            gradients += [p._unsharded_param.grad for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    # a gradient that only C++ holds has got its Python object by this
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type != "meta" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
    del gradients
    return sum(sizes.values())
