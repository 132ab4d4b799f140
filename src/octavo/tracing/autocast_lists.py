"""The operations that `torch.autocast` casts on a GPU, grouped by the dtype of their inputs.

Autocast knows an operation by its name in the dispatcher ("softmax.int"), and casts floating tensors, float64 excepted:

    LOWER    inputs to BF16 or FP16: matrix products, convolutions and attention
    FP32     inputs to FP32: powers, exponentials, norms and losses, whose sums and ranges 8 or 11 bits do not hold
    RESULT   nothing, but the result is computed in FP32: softmax and sums, which have an argument for it
    PROMOTE  all inputs to the widest dtype among them

Operations in none of the lists run in the dtype of their inputs; PyTorch widens an input if two dtypes meet.

Source: ATen/autocast_mode.h of PyTorch, and "CUDA Ops that can autocast" in the documentation of torch.amp.
"""

from typing import Literal

Policy = Literal["lower", "fp32", "result", "promote"]

_LOWER = (
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist",
    "pdist", "cdist", "renorm", "logsumexp", "norm.Scalar", "norm.ScalarOpt_dim",
    "norm.names_ScalarOpt_dim", "upsample_nearest1d",
    "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
    # before torch 2.13
    "softmax.Dimname", "log_softmax.Dimname", "prod.dim_Dimname", "sum.dim_DimnameList", "cumprod.dimname",
    "cumsum.dimname",
)  # fmt: skip
_PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip

POLICIES: dict[str, Policy] = {
    **dict.fromkeys(_LOWER, "lower"),
    **dict.fromkeys(_FP32, "fp32"),
    **dict.fromkeys(_RESULT, "result"),
    **dict.fromkeys(_PROMOTE, "promote"),
}
