model = dict(
    type="VLM",
    llm=dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1),
    vit=dict(
        hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    ),
    pixel_shuffle_factor=2,
)
tokenizer = dict(type="ChatTokenizer", path="tokenizer")
processor = dict(max_image_size=32)
train_dataloader = dict(
    batch_size=1,
    seq_length=1600,
    packing=dict(type="WindowPacking", window=64),
    dataset=dict(type="UnifiedGenerationDataset", data_path="train.jsonl"),
)
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=5e-3), precision="fp32")
train_cfg = dict(max_updates=6)
backend = dict(type="single")
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=1), checkpoint=dict(type="CheckpointHook", interval=2, by_epoch=False)
)
randomness = dict(seed=1)
work_dir = "run"
