# init.py would write epochs of your documents: differs because a new model is trained on 20 tokens a parameter.
"""A Llama of 90 M parameters, from scratch, on documents: a JSONL of ``{"text": ...}``.

12 layers of width 640, SmolLM2's vocabulary, embeddings tied. On 8 GPUs an update is 256 sequences of 2048 tokens,
about half a million tokens; the length is 20 tokens a parameter.

    torchrun --nproc-per-node 8 tools/train.py decoder_lm_90m --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

batch_size, accumulative_counts, seq_length, max_tokens = 8, 4, 2048, 1_800_000_000
_warmup_tokens = max_tokens // 50

model = dict(
    type="DecoderLM",
    llm=dict(
        model_type="llama",
        vocab_size=49152,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=5,
        max_position_embeddings=seq_length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_dropout=0.0,
    ),
    dropout=0.0,
    activation_checkpointing=False,
)
tokenizer = dict(
    type="PretrainedTokenizer",
    path="HuggingFaceTB/SmolLM2-135M",
    bos="<|endoftext|>",
    eos="<|endoftext|>",
    image_start=None,
    image_end=None,
)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=4,
    seq_length=seq_length,
    packing=dict(type="BestFitPacking", window=8192),
    dataset=dict(type="UnifiedGenerationDataset", data_path="train.jsonl", index_workers=4),
)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
    accumulative_counts=accumulative_counts,
    clip_grad=dict(max_norm=1.0),
    paramwise_cfg=dict(norm_decay_mult=0.0),
    precision="bf16",
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, unit="token", begin=0, end=_warmup_tokens),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.1, unit="token", begin=_warmup_tokens, end=max_tokens),
]
train_cfg = dict(max_tokens=max_tokens)
backend = dict(type="fsdp", sharding_strategy="FULL_SHARD")
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1000, max_keep_ckpts=3),
)
randomness = dict(seed=42)
