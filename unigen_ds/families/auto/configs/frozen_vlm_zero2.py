# init.py would write a frozen vision tower and all else trained: differs because F-LMM trains the projector alone.
"""A frozen vision-language model of transformers whose projector alone is trained: F-LMM's outline, under ZeRO-2.

As in the guides of that trainer: 64 samples a device, 2 iterations an update and 2 devices are 256 samples an update;
8 epochs, a warm-up and a cosine counted in epochs, a checkpoint every 100 iterations. Only what has a gradient is in
the engine's shards and moments; ``iter_<n>.pth`` is a folder. A head of your own (as F-LMM's mask decoder) is a family
in ``custom_imports``: docs/extending/model.md.

    deepspeed --num_gpus 2 tools/train.py frozen_vlm_zero2 --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

_base_ = "llava_zero2.py"
batch_size, accumulative_counts, seq_length, max_epochs, warmup_ratio = 64, 2, 1024, 8, 0.03
save_steps, save_total_limit = 100, 1

model = dict(freeze=["vision_tower", "language_model", "lm_head"])
train_dataloader = dict(batch_size=batch_size, seq_length=seq_length)
val_dataloader = dict(split=0.01)
optim_wrapper = dict(
    optimizer=dict(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01), accumulative_counts=accumulative_counts
)
param_scheduler = [
    dict(
        type="LinearLR",
        start_factor=1e-5,
        by_epoch=True,
        begin=0,
        end=warmup_ratio * max_epochs,
        convert_to_iter_based=True,
    ),
    dict(
        type="CosineAnnealingLR",
        eta_min=0.0,
        by_epoch=True,
        begin=warmup_ratio * max_epochs,
        end=max_epochs,
        convert_to_iter_based=True,
    ),
]
train_cfg = dict(max_epochs=max_epochs)
default_hooks = dict(checkpoint=dict(interval=save_steps, max_keep_ckpts=save_total_limit))
work_dir = "work_dirs/frozen_vlm_zero2"
