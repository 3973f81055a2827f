# init.py would write up to 20 epochs under FSDP: differs because it repeats LLaVA's own second stage.
"""Visual instruction tuning of LLaVA-1.5-7B, or of any model of transformers that reads images, under ZeRO-2.

As LLaVA's own second stage: the vision tower is frozen, projector and language model are trained, 128 conversations an
update on 8 GPUs, one epoch. ``train.jsonl`` may have LLaVA's own records (``{image, conversations: [{from, value}]}``).

    deepspeed --num_gpus 8 tools/train.py llava_zero2 --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

batch_size, accumulative_counts, seq_length, max_epochs = 4, 4, 2048, 1
_pretrained = "llava-hf/llava-1.5-7b-hf"

model = dict(type="ImageTextToText", pretrained=_pretrained, freeze=["vision_tower"], activation_checkpointing=True)
tokenizer = dict(type="ModelTokenizer", path=_pretrained)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=4,
    seq_length=seq_length,
    overflow="truncate",
    dataset=dict(type="UnifiedGenerationDataset", data_path="train.jsonl", index_workers=4),
)
val_dataloader = dict(split=0.005)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=2e-5, weight_decay=0.0),
    accumulative_counts=accumulative_counts,
    clip_grad=dict(max_norm=1.0),
    precision="bf16",
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=True, begin=0, end=0.03 * max_epochs, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", by_epoch=True, begin=0.03 * max_epochs, end=max_epochs, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=max_epochs)
backend = dict(type="deepspeed", config="zero2")
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1000, max_keep_ckpts=2),
)
work_dir = "work_dirs/llava_zero2"
