"""A frozen vision-language model of transformers whose projector alone is trained: F-LMM's outline, under ZeRO-2.

As in the guides of that trainer: 64 samples a device, 2 iterations an update and 2 devices are 256 samples an update;
8 epochs, a warm-up and a cosine counted in epochs, a checkpoint every 100 iterations. Only what has a gradient is in
the engine's shards and moments; ``iter_<n>.pth`` is a folder. A head of your own (as F-LMM's mask decoder) is a family
in ``custom_imports``: docs/extending.md.

    deepspeed --num_gpus 2 tools/train.py frozen_vlm_zero2 --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

batch_size, accumulative_counts, max_epochs, warmup_ratio = 64, 2, 8, 0.03
save_steps, save_total_limit = 100, 1
_pretrained = "llava-hf/llava-1.5-7b-hf"

model = dict(
    type="ImageTextToText",
    pretrained=_pretrained,
    freeze=["vision_tower", "language_model", "lm_head"],
    activation_checkpointing=True,  # the projector's gradient comes through all frozen layers
)
tokenizer = dict(type="ModelTokenizer", path=_pretrained)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=4,
    seq_length=1024,
    overflow="truncate",
    dataset=dict(type="UnifiedGenerationDataset", data_path="train.jsonl", index_workers=4),
)
val_dataloader = dict(split=0.01)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01),
    accumulative_counts=accumulative_counts,
    clip_grad=dict(max_norm=1.0),
    precision="bf16",
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
backend = dict(type="deepspeed", config="zero2")
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=save_steps, max_keep_ckpts=save_total_limit),
)
work_dir = "work_dirs/frozen_vlm_zero2"
