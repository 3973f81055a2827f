# init.py would write epochs of your documents: differs because a new model is trained on 20 tokens a parameter.
"""A Llama of 300 M parameters, from scratch: ``decoder_lm_90m`` with 20 layers of width 1024, half its learning rate.

Layers are computed again in the backward pass: less memory, more time.
"""

_base_ = "decoder_lm_90m.py"
max_tokens = 6_000_000_000
_warmup_tokens = max_tokens // 50

model = dict(
    llm=dict(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=8,
    ),
    activation_checkpointing=True,
)
optim_wrapper = dict(optimizer=dict(lr=3e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, unit="token", begin=0, end=_warmup_tokens),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.1, unit="token", begin=_warmup_tokens, end=max_tokens),
]
train_cfg = dict(max_tokens=max_tokens)
