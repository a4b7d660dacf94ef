"""Settings of Levanter, nanoGPT and MaxText that have another name here, or none: advice for configs that use them.

`configs/guide/from_levanter.md`, `from_nanogpt.md` and `from_maxtext.md` have the complete tables.
"""

_REMOVE = "remove it"

# Flags without a value -> what to do.
SWITCHES = {"resume": "run the same command again to resume"}

# The last part of a setting's name -> what to do.
ADVICE = {
    # Levanter
    "cache_options": f"{_REMOVE}: shards follow the input files",
    "mixture_block_size": f"{_REMOVE}: blocks of a mixture have 2,048 sequences",
    "permutation_type": "set data.shuffle: true, a full permutation per epoch",
    "cooldown": "set optimizer.decay",
    "haps": "set optimizer.cycles",
    "require_accelerator": f"{_REMOVE}: the devices of a run are logged at its start",
    "jax_config": f"{_REMOVE}, and set JAX's environment variables",
    "profiler_start_step": "set trainer.profiler: {start_step: 5, num_steps: 100}",
    "profiler_num_steps": "set trainer.profiler: {start_step: 5, num_steps: 100}",
    "quantization": "set q in trainer.mp, such as p=f32,c=bfloat16,q=fp8",
    "log_entropy": "unsupported",
    "peft_save_path": "set hf_save_path: exports of a run with lora are adapters",
    "peft_hf_upload": "set hf_upload: exports of a run with lora are adapters",
    "merged_hf_save_path": "run lmtrain export-hf --merge --output DIR after training",
    "merged_hf_upload": "run lmtrain export-hf --merge --upload REPO after training",
    "original_max_position_embeddings": "set model.rope.original_seq_len",
    # nanoGPT
    "n_layer": "set model.num_layers",
    "n_head": "set model.num_heads",
    "n_embd": "set model.hidden_dim",
    "block_size": "set model.seq_len",
    "max_iters": "set trainer.num_train_steps",
    "eval_interval": "set trainer.steps_per_eval",
    "eval_iters": "set trainer.max_eval_batches",
    "out_dir": "set trainer.checkpointer.base_path",
    "grad_clip": "set optimizer.max_grad_norm",
    "init_from": "set initialize_from_hf",
    # MaxText
    "per_device_batch_size": "set trainer.train_batch_size, the batch over all devices",
    "max_target_length": "set model.seq_len",
    "base_emb_dim": "set model.hidden_dim",
    "base_num_query_heads": "set model.num_heads",
    "base_num_kv_heads": "set model.num_kv_heads",
    "base_num_decoder_layers": "set model.num_layers",
    "base_mlp_dim": "set model.intermediate_dim",
    "ici_fsdp_parallelism": f"{_REMOVE}: FSDP uses all devices that no other axis takes",
    "ici_tensor_parallelism": "set trainer.model_axis_size and trainer.tensor_parallel_axes",
    "dcn_data_parallelism": "set trainer.replica_dcn_axis_size",
    "remat_policy": "set model.gradient_checkpointing",
    "base_output_directory": "set trainer.checkpointer.base_path and trainer.log_dir",
    "checkpoint_period": "set trainer.checkpointer.keep: [{every: 1000}]",
}
