"""FP8 from the first rounding to the generated text, in one file that needs only PyTorch.

    python examples/octavo_in_one_file.py        # one to two minutes on a CPU

A small Llama is trained on the source code of Python in BF16 and in FP8, packed into a folder of eight-bit weights that
transformers and vLLM open, loaded from it, and asked for text: the steps of `make demo`. Nothing is fast here. A test
holds bytes, gradients and the packed folder equal to the package's, which has the same mathematics in kernels.

1. Numbers. E4M3 is a byte: a sign, 4 bits of exponent, 3 bits of mantissa. It reaches from 2^-9 to 448, and its normal
   numbers are 6 to 12 % apart. A tensor of any range fits after a division by a *scale*, one a row: x ≈ x_q * scale.

2. The linear layer. Training multiplies three times, with T tokens, K inputs and N outputs:

       y [T,N] = x[T,K] @ w[N,K]^T         dx[T,K] = dy[T,N] @ w[N,K]         dw[N,K] = dy[T,N]^T @ x[T,K]

   A GPU's FP8 GEMM wants both operands contiguous along the axis of its sum, and scales that do not vary along it. But
   dx sums over N and dw over T, along which the row scales s_w and s_x vary. The usual way out is to quantize each
   tensor a second time, along its other axis. Here each tensor is quantized once. The backward pass transposes the
   bytes, and the scale that would vary along the sum is multiplied into the other operand:

       y  = x_q @ w_q^T     * s_x[T] * s_w[N]
       g  = dy * s_w[N] * m[T]  -> g_q, s_g[T]      s_x = m * 2^e with m in [1, 2); s_g is rounded up to a power of two
       dx = g_q @ wT_q^T    * (s_g[T] / m[T])       wT_q: the bytes of w_q, transposed
       dw = h_q @ xT_q^T    * (c_max / s_w[N])      c = 2^e * s_g; h_q = g_q^T, column t times c[t] / c_max

   c[t] / c_max is a power of two: only the exponents of g_q^T move. Forward and backward use the same weight, and the
   layer keeps one byte an element of x for the backward pass.
"""

import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------- 1. numbers

MAX, BIAS, MANTISSA, NAN_CODE = 448.0, 7, 3, 0x7F  # of E4M3: code = sign, eeee, mmm; the largest code stands for NaN
FLOOR = 2.0**-8  # of a weight row's scale: a row far below the others would vanish from dy * s_w, and could not grow


def encode(x: Tensor) -> Tensor:
    """The E4M3 codes, uint8, of float32 x, rounded to nearest, ties to even; numbers beyond 448 become 448."""
    a = x.abs().clamp(max=MAX)
    exponent = torch.frexp(a.clamp(min=2.0 ** (1 - BIAS))).exponent - 1  # floor(log2(a)); -6 for subnormal numbers
    units = torch.ldexp(a, MANTISSA - exponent).round()  # a in units of its spacing: 8 to 16, fewer if subnormal
    # A normal number's 8 units add the 1 that is missing here, and 16 units carry into the exponent.
    code = torch.where(x.isnan(), NAN_CODE, ((exponent + BIAS - 1) << MANTISSA) + units.nan_to_num().int())
    return torch.where(x.signbit(), code | 0x80, code).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """The numbers, float32, of E4M3 codes, uint8."""
    field = codes.int() & 0x7F
    exponent, mantissa = field >> MANTISSA, field & 0b111
    significand = torch.where(exponent > 0, mantissa + 8, mantissa).float()
    magnitude = torch.ldexp(significand, exponent.clamp(min=1) - BIAS - MANTISSA)
    return torch.where(field == NAN_CODE, torch.nan, torch.where(codes > 0x7F, -magnitude, magnitude))


def quantize(x: Tensor, floor: float = 0.0, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales [M, 1] of x [M, K]. No scale is below `floor` times the largest; pow2 rounds them up."""
    scale = (x.abs().amax(1, keepdim=True) / MAX).clamp(min=2.0**-126)  # a row of zeros has a scale, too
    scale = torch.maximum(scale, scale.amax() * floor)
    if pow2:  # adding all ones to the mantissa carries into the exponent, unless the mantissa is 0
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return encode(x * (1 / scale)), scale


# ------------------------------------------------------------------------------------------- 2. the linear layer


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, R] @ b [N, R]^T of codes. float32 holds a product of two E4M3 numbers exactly, and sums them."""
    with torch.autocast("cpu", enabled=False):
        return decode(a) @ decode(b).t()


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        x_q, s_x = quantize(x.float())
        w_q, s_w = quantize(w.float(), FLOOR)
        ctx.save_for_backward(x_q, s_x, w_q, s_w)
        ctx.dtype = x.dtype
        return (gemm(x_q, w_q) * s_x * s_w.t()).to(dtype)  # [T,K] @ [N,K]^T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x_q, s_x, w_q, s_w = ctx.saved_tensors
        fraction, exponent = torch.frexp(s_x)
        m, e = 2 * fraction, exponent - 1  # s_x = m * 2^e
        g_q, s_g = quantize(dy.float() * s_w.t() * m, pow2=True)
        dx = gemm(g_q, w_q.t()) * (s_g / m)  # [T,N] @ [K,N]^T
        c = e + torch.frexp(s_g).exponent - 1  # log2 of 2^e * s_g
        h_q = encode(torch.ldexp(decode(g_q), c - c.amax())).t()  # exponents move; the smallest numbers are rounded
        dw = gemm(h_q, x_q.t()) * (2.0 ** c.amax() / s_w)  # [N,T] @ [K,T]^T
        return dx.to(dy.dtype).to(ctx.dtype), dw, None


class Linear(nn.Linear):
    """A linear layer without bias that computes y, dx and dw in FP8. Its parameter stays in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        y = LinearFunction.apply(x.reshape(-1, x.shape[-1]), self.weight, dtype)
        return y.view(*x.shape[:-1], -1)


def convert(model: nn.Module) -> Any:
    """Let all linear layers but the head compute in FP8, in place. Parameters and names stay as they are."""
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and name != "lm_head":
            layer.__class__ = Linear
    return model


# ---------------------------------------------------------------------------- 3. a Llama, as transformers has it


CONFIG = {  # by which transformers and vLLM build the same model
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "dtype": "bfloat16",
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, hidden, self.heads = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in names})
        self.mlp = nn.ModuleDict({name: nn.Linear(width, hidden, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))

    def attention(self, x: Tensor) -> Tensor:
        split = [self.self_attn[name](x).unflatten(-1, (self.heads, -1)) for name in ("q_proj", "k_proj", "v_proj")]
        q, k, v = (t.transpose(1, 2) for t in split)  # [B, H, T, d]
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True).transpose(1, 2)
        return self.self_attn["o_proj"](y.flatten(2))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: the pair (i, i + d/2) of x [B, H, T, d] turns by t * 10000^(-2i/d)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1).to(x.dtype)


class Llama(nn.Module):
    """Logits [B, T, 256] from bytes [B, T]: the text needs no tokenizer. The head shares the embedding's weight."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.context, width = config, config["max_position_embeddings"], config["hidden_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(256, width)
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(width, 1e-5)
        self.lm_head = nn.Linear(width, 256, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(self.model.norm(x))


def train(model: Llama, text: Tensor, steps: int = 200, batch: int = 8) -> float:
    """AdamW on random pieces of the text. Returns the mean loss of the last 20 steps, in nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(1, steps + 1):
        first = torch.randint(len(text) - model.context, (batch, 1), generator=generator)
        piece = text[first + torch.arange(model.context + 1)].long()
        with torch.autocast("cpu", torch.bfloat16):  # what is not FP8 runs in BF16
            logits = model(piece[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    return sum(losses[-20:]) / len(losses[-20:])


# ------------------------------------------------------------------------------------ 4. pack, load and generate

NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP = {
    "targets": ["Linear"], "output_activations": None, "format": "float-quantized",
    "weights": NUMBER | {"strategy": "channel", "dynamic": False},  # a scale for each row, stored
    "input_activations": NUMBER | {"strategy": "token", "dynamic": True},  # a scale for each token, computed
}  # fmt: skip
QUANTIZATION = {
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "float-quantized",
    "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"], "kv_cache_scheme": None,
}  # fmt: skip
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file: the length of a JSON header in 8 bytes, the header, and the bytes of all tensors."""
    names, header, end = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    data = (t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    raw = path.read_bytes()
    data, tensors = 8 + int.from_bytes(raw[:8], "little"), {}
    for name, entry in json.loads(raw[8:data]).items():
        first, end = (data + offset for offset in entry["data_offsets"])
        tensors[name] = torch.frombuffer(bytearray(raw[first:end]), dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def pack(model: Llama, folder: Path) -> None:
    """Write the codes that training multiplied, their scales, and all else in BF16: the layout compressed-tensors."""
    tensors = {}
    for name, t in model.state_dict().items():
        if isinstance(model.get_submodule(name.rpartition(".")[0]), Linear):
            codes, tensors[f"{name}_scale"] = quantize(t.float(), FLOOR)
            tensors[name] = codes.view(torch.float8_e4m3fn)
        elif name != "lm_head.weight":  # it is the embedding
            tensors[name] = t.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(model.config | {"quantization_config": QUANTIZATION}, indent=2))


class PackedLinear(nn.Module):
    """y [.., N] of x [.., K], from the codes [N, K] and the scales [N, 1] of a folder."""

    def __init__(self, w: Tensor, s_w: Tensor) -> None:
        super().__init__()
        self.w_q, self.s_w = w.view(torch.uint8), s_w

    def forward(self, x: Tensor) -> Tensor:
        x_q, s_x = quantize(x.reshape(-1, x.shape[-1]).float())
        return (gemm(x_q, self.w_q) * s_x * self.s_w.t()).to(x.dtype).view(*x.shape[:-1], -1)


def load(folder: Path) -> Llama:
    """The model of a packed folder, in BF16 and FP8."""
    model = Llama(json.loads((folder / "config.json").read_text())).bfloat16()
    tensors = read_safetensors(folder / "model.safetensors")
    for layer in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        codes, scale = tensors.pop(f"{layer}.weight"), tensors.pop(f"{layer}.weight_scale")
        model.set_submodule(layer, PackedLinear(codes, scale))
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    return model


@torch.no_grad()
def generate(model: Llama, prompt: str, count: int = 120, temperature: float = 0.6) -> str:
    """The prompt and `count` sampled bytes. A server would keep keys and values; here each step reads all the text."""
    tokens, generator = torch.tensor([list(prompt.encode())]), torch.Generator().manual_seed(0)
    for _ in range(count):
        logits = model(tokens[:, -model.context :])[0, -1].float() / temperature
        sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, sampled[None]), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    for recipe in ("bf16", "fp8"):
        torch.manual_seed(0)
        model = Llama(CONFIG)
        loss = train(convert(model) if recipe == "fp8" else model, text)
        print(f"{recipe}: mean loss of the last 20 steps {loss:.4f} (one seed decides nothing)")
    pack(model, folder := Path("runs/one_file"))
    print(f"packed into {folder}: {(folder / 'model.safetensors').stat().st_size:,} bytes")
    print(generate(load(folder), "def "))


if __name__ == "__main__":
    main()
