"""DeepInfer's modules for Neuron under their own names: a host changes the line that imports them and nothing else.

    from deepinfer_prep.runtime.deepinfer import fp8, neuron_compile, nki_gemm, nki_hc

Names, parameters, switches and return values are those that serving code knows; the work is done by the modules of
`deepinfer_prep.runtime`.
"""
