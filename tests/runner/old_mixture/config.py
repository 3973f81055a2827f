model = dict(
    type="DecoderLM",
    llm=dict(
        model_type="llama",
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    ),
)
tokenizer = dict(
    type="WordTokenizer", words=["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
)
train_dataloader = dict(
    batch_size=2,
    seq_length=16,
    packing=dict(type="WindowPacking", window=16),
    dataset=[
        dict(type="UnifiedGenerationDataset", data_path="talk.jsonl", weight=0.5),
        dict(type="UnifiedGenerationDataset", data_path="short.jsonl", weight=1),
        dict(type="UnifiedGenerationDataset", data_path="long.jsonl", weight=0.7),
    ],
)
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=5e-3))
train_cfg = dict(max_updates=24)
backend = dict(type="single")
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=5, by_epoch=False))
randomness = dict(seed=1)
work_dir = "run"
