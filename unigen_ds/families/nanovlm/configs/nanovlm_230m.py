# init.py would write validation and one learning rate: differs because it is nanovlm_460m in another size.
"""``nanovlm_460m`` with nanoVLM's smaller language model: SigLIP2-base-512 and SmolLM2-135M, 228 M parameters.

The sizes of ``lusxvr/nanoVLM-230M-8k``, which ``model.pretrained=DIR`` loads. An image: one tile, 512 px, 64 tokens.

    python tools/train.py nanovlm_230m --cfg-options train_dataloader.dataset.data_path=my.parquet
"""

_base_ = "nanovlm_460m.py"

model = dict(
    llm=dict(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
)
tokenizer = dict(path="HuggingFaceTB/SmolLM2-135M-Instruct")
processor = dict(max_image_size=512)
val_dataloader = None
custom_hooks = None
