# init.py would write no config for it: differs because a demo makes its own data, for a model from scratch.
"""A unified text + image model learns scikit-learn's real handwritten digits: to draw them and to read them.

About 3 minutes on 2 CPU cores. One packed sequence holds six or seven samples of either direction; both losses train
together; prompts are dropped now and then, so that drawing can be guided.
"""

custom_imports = dict(imports=["unigen_ds.examples.digits"])  # DigitsDataset and DigitsReportHook

batch_size, accumulative_counts, max_epochs, save_steps, save_total_limit = 12, 1, 24, 100, 3
seq_length = 128

model = dict(
    type="UnifiedModel",
    llm=dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        dropout=0.1,
    ),
    vit=dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_channels=1,
    ),
    vae=dict(type="PixelAutoencoder", channels=1),
    latent_patch_size=2,
    max_latent_size=4,
)
tokenizer = dict(
    type="WordTokenizer",
    words=[
        *("draw", "a", "handwritten", "this", "is"),
        *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    ],
)
processor = dict(
    vit_transform=dict(type="ImageTransform", max_size=8, min_size=8, stride=4, mode="L"),
    vae_transform=dict(type="ImageTransform", max_size=8, min_size=8, stride=2, mode="L"),
    text_dropout=0.1,
)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=1,
    seq_length=seq_length,
    packing=dict(type="BestFitPacking", window=512),
    dataset=dict(type="DigitsDataset", root="work_dirs/data/digits", split="train"),
)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05),
    accumulative_counts=accumulative_counts,
    clip_grad=dict(max_norm=1.0),
    precision="fp32",
)
loss_weights = dict(text=1.0, image=1.0)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=True, begin=0, end=1, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=0.0, by_epoch=True, begin=1, end=max_epochs, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=max_epochs)
backend = dict(type="single")
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=save_steps, max_keep_ckpts=save_total_limit),
)
custom_hooks = [dict(type="EMAHook", momentum=0.01, begin_epoch=1), dict(type="DigitsReportHook")]
randomness = dict(seed=42)
env = dict(num_threads=1)  # so small a model gains nothing from a second thread, and loses much on a busy machine
