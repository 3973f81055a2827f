custom_imports = dict(imports=["tests.plugin_text.numbers", "tests.plugin"])
model = dict(
    type="NumbersLM",
    llm=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=64, tie_word_embeddings=False,
    ),
)  # fmt: skip
tokenizer = dict(type="WordTokenizer", words=["the", "sum", "product", "of", "and", "is"])
train_dataloader = dict(
    batch_size=2,
    seq_length=48,
    packing=dict(type="BestFitPacking", window=32),
    dataset=dict(type="NumbersFile", path=""),
)
optim_wrapper = dict(optimizer=dict(type="SoftSign", lr=1e-2), accumulative_counts=2)
loss_weights = dict(number=0.1)
train_cfg = dict(max_epochs=4)
default_hooks = dict(logger=dict(interval=1))
