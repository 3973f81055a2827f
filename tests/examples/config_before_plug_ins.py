"""``config.py`` of a work dir as version 0.1.0 wrote it before the digits were a plug-in: no ``custom_imports``."""

# fmt: off
backend = dict(type='single')
custom_hooks = [
    dict(type='DigitsReportHook'),
]
default_hooks = dict(
    checkpoint=dict(
        by_epoch=False, interval=-1, max_keep_ckpts=3, type='CheckpointHook'),
    logger=dict(interval=1, type='LoggerHook'),
    timer=dict(type='IterTimerHook'))
env = dict(num_threads=1)
launcher = 'none'
load_from = None
loss_weights = dict(image=1.0, text=1.0)
model = dict(
    latent_patch_size=2,
    llm=dict(
        dropout=0.0,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2),
    max_latent_size=4,
    type='UnifiedModel',
    vae=dict(channels=1, type='PixelAutoencoder'),
    vit=dict(
        hidden_size=16,
        image_size=8,
        intermediate_size=32,
        num_attention_heads=2,
        num_channels=1,
        num_hidden_layers=1,
        patch_size=4))
optim_wrapper = dict(
    accumulative_counts=1,
    clip_grad=dict(max_norm=1.0),
    optimizer=dict(
        betas=(
            0.9,
            0.95,
        ), lr=0.002, type='AdamW', weight_decay=0.05),
    precision='fp32')
param_scheduler = [
    dict(
        begin=0,
        by_epoch=True,
        convert_to_iter_based=True,
        end=1,
        start_factor=0.01,
        type='LinearLR'),
    dict(
        begin=1,
        by_epoch=True,
        convert_to_iter_based=True,
        end=24,
        eta_min=0.0,
        type='CosineAnnealingLR'),
]
processor = dict(
    text_dropout=0.1,
    vae_transform=dict(
        max_size=8, min_size=8, mode='L', stride=2, type='ImageTransform'),
    vit_transform=dict(
        max_size=8, min_size=8, mode='L', stride=4, type='ImageTransform'))
randomness = dict(seed=42)
resume = False
tokenizer = dict(
    type='WordTokenizer',
    words=[
        'draw',
        'a',
        'handwritten',
        'this',
        'is',
        'zero',
        'one',
        'two',
        'three',
        'four',
        'five',
        'six',
        'seven',
        'eight',
        'nine',
    ])
train_cfg = dict(max_epochs=24)
train_dataloader = dict(
    batch_size=12,
    dataset=dict(
        root='work_dirs/data/digits', split='train', type='DigitsDataset'),
    drop_last=True,
    num_workers=0,
    packing=dict(type='WindowPacking', window=512),
    seq_length=80)
val_dataloader = None
work_dir = None
