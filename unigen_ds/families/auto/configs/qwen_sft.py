# init.py would write length, update and epochs by your records: differs because it is for long chats on 8 devices.
"""Supervised fine-tuning of Qwen2.5-0.5B-Instruct, or of any language model of transformers, on conversations.

The model's own chat template; the assistant's turns are learned. On 8 GPUs an update is 64 sequences of up to 4096
tokens. Another model: its name or folder in ``model.pretrained`` and ``tokenizer.path``.

    torchrun --nproc-per-node 8 tools/train.py qwen_sft --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

batch_size, accumulative_counts, seq_length, max_epochs = 1, 8, 4096, 3
_pretrained = "Qwen/Qwen2.5-0.5B-Instruct"

model = dict(type="CausalLM", pretrained=_pretrained, activation_checkpointing=True)
tokenizer = dict(type="ModelTokenizer", path=_pretrained)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=4,
    seq_length=seq_length,
    packing=dict(type="BestFitPacking", window=4096),
    dataset=dict(type="UnifiedGenerationDataset", data_path="train.jsonl", index_workers=4),
)
val_dataloader = dict(split=0.01)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1),
    accumulative_counts=accumulative_counts,
    clip_grad=dict(max_norm=1.0),
    paramwise_cfg=dict(norm_decay_mult=0.0),
    precision="bf16",
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=True, begin=0, end=0.03 * max_epochs, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=0.1,
        by_epoch=True,
        begin=0.03 * max_epochs,
        end=max_epochs,
        convert_to_iter_based=True,
    ),
]
train_cfg = dict(max_epochs=max_epochs)
backend = dict(type="fsdp", sharding_strategy="FULL_SHARD")
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=500, max_keep_ckpts=2),
)
work_dir = "work_dirs/qwen_sft"
