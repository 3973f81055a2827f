custom_imports = dict(imports=["tests.plugin"])
model = dict(type="RowsNetwork", num_inputs=3)
train_dataloader = dict(batch_size=4, dataset=dict(type="RowsFile", path="rows.txt"))
optim_wrapper = dict(optimizer=dict(type="SoftSign", lr=3e-2), accumulative_counts=2)
param_scheduler = [dict(type="InverseSqrtLR", flat=10.0, unit="update")]
loss_weights = dict(label=0.5)
train_cfg = dict(max_epochs=2)
custom_hooks = [dict(type="LowestLossHook")]
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=4, max_keep_ckpts=-1), logger=dict(interval=1))
work_dir = "work_dirs/regression"
