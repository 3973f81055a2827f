custom_imports = dict(imports=["painter"])
model = dict(
    type="Painter",
    llm=dict(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    ),
)
tokenizer = dict(type="WordTokenizer", words=["draw", "what", "is", "this", "red", "green", "blue", "black"])
train_dataloader = dict(batch_size=4, dataset=dict(type="UnifiedGenerationDataset", data_path="colours.jsonl"))
val_dataloader = dict(batch_size=4, dataset=dict(type="UnifiedGenerationDataset", data_path="colours.jsonl"))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=3e-3))
train_cfg = dict(max_updates=100)
custom_hooks = [
    dict(type="PreviewHook", interval=20, prompts=["draw red"], num_held_out=2, flow=dict(temperature=0.5)),
    dict(type="EvaluateHook", unit="update", interval=20),
]
work_dir = "work_dirs/painter"
