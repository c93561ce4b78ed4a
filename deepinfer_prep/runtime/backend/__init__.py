"""The `deepinfer_neuron` torch.compile backend."""
