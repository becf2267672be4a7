"""Writes a folder's weights in packings of Hugging Face's exports, for oracle.py: fp8 blocks, compressed-tensors, AWQ, GPTQ.

The weights are rounded to numbers that the packing has, so that all readers of it stand before the same model. mlx-lm
converts all of them but GPTQ, of which it reads no published layout: what it answers from is then a folder of its own
(`read_by_mlx_lm`), with the same integers in MLX's affine packing.
"""

import json

import mlx.core as mx
import numpy as np

GROUP = 32
BLOCK = 128
# What a word of AWQ has in turn: the even ones of eight before the odd ones.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_folder(folder, config, method, bits=4):
    """The matrices of the layers in this packing, and the fields of config.json that say so."""
    path = folder / "model.safetensors"
    weights, made, types = mx.load(str(path)), {}, {}
    mx.eval(list(weights.values()))
    converted = {}
    for name, value in weights.items():
        if not is_packed(name, value, method):
            made[name] = converted[name] = value
            continue
        base = name.removesuffix(".weight")
        if method == "fp8":
            made[name], made[f"{name}_scale_inv"] = fp8_blocks(value)
            types[name] = "F8_E4M3"
        elif method == "compressed-tensors":
            made |= {f"{base}.{field}": own for field, own in symmetric(value).items()}
        else:
            integers, zeros, scales = asymmetric(value, bits)
            made |= {f"{base}.{field}": own for field, own in columns(method, bits, integers, zeros, scales).items()}
            converted |= {f"{base}.{field}": own for field, own in affine(bits, integers, zeros, scales).items()}
    if method == "gptq":
        own = folder / "converted"
        own.mkdir(exist_ok=True)
        mx.save_safetensors(str(own / "model.safetensors"), converted, {"format": "mlx"})
        (own / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": GROUP, "bits": bits}}))
    save(path, made, types)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings(method, bits)}))


def read_by_mlx_lm(folder):
    """The folder that mlx-lm reads the weights of."""
    own = folder / "converted"
    return own if own.exists() else folder


def settings(method, bits):
    return {"quant_method": method} | {
        "fp8": {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        "compressed-tensors": {
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": GROUP, "symmetric": True}}},
            "ignore": ["lm_head"],
        },
        "awq": {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        "gptq": {"bits": bits, "group_size": GROUP, "desc_act": False, "sym": False},
    }[method]


def is_packed(name, value, method):
    """Projections of the layers; of compressed-tensors, as in Kimi's models, those of experts alone."""
    if value.ndim != 2 or ".layers." not in name or name.endswith("gate.weight"):
        return False
    return method != "compressed-tensors" or ".mlp.experts." in name


def fp8_blocks(weight):
    """Numbers of 8 bits and a scale for each block, the last ones of a row or a column smaller."""
    rows, columns = weight.shape
    bottom, side = -rows % BLOCK, -columns % BLOCK
    blocks = mx.pad(weight.astype(mx.float32), ((0, bottom), (0, side)))
    blocks = blocks.reshape((rows + bottom) // BLOCK, BLOCK, (columns + side) // BLOCK, BLOCK)
    scales = mx.abs(blocks).max(axis=(1, 3)) / 448
    numbers = mx.to_fp8(blocks / scales[:, None, :, None])
    return numbers.reshape(rows + bottom, columns + side)[:rows, :columns], scales


def symmetric(weight):
    """Integers from -8 to 7, stored from 0 on."""
    rows = weight.astype(mx.float32).reshape(weight.shape[0], -1, GROUP)
    scales = (mx.abs(rows).max(axis=-1) / 7).astype(weight.dtype)
    integers = mx.clip(mx.round(rows / scales.astype(mx.float32)[..., None]), -8, 7) + 8
    packed = words(np.array(integers).reshape(weight.shape).astype(np.uint32), 4, range(8))
    shape = mx.array(weight.shape, dtype=mx.int64)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}


def asymmetric(weight, bits):
    """Integers, and for each group a zero point, at least 1, and a scale."""
    most = (1 << bits) - 1
    groups = np.array(weight.astype(mx.float32)).reshape(weight.shape[0], -1, GROUP)
    low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
    scales = np.array(mx.array((high - low) / most).astype(weight.dtype).astype(mx.float32))
    zeros = np.clip(np.round(-low / scales), 1, most)
    integers = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, most)
    return (
        integers.reshape(weight.shape).astype(np.uint32),
        zeros.astype(np.uint32),
        mx.array(scales).astype(weight.dtype),
    )


def affine(bits, integers, zeros, scales):
    """What they are for MLX."""
    biases = -mx.array(zeros.astype(np.float32)) * scales.astype(mx.float32)
    packed = words(integers, bits, range(32 // bits)).view(mx.uint32)
    return {"weight": packed, "scales": scales, "biases": biases.astype(scales.dtype)}


def columns(method, bits, integers, zeros, scales):
    """With inputs as rows: AWQ has outputs in a word, GPTQ inputs."""
    in_turn = range(32 // bits)
    if method == "awq":
        own = {"qweight": words(integers.T, bits, AWQ_ORDER), "qzeros": words(zeros.T, bits, AWQ_ORDER)}
    else:
        inputs = np.arange(integers.shape[1], dtype=np.int32)
        own = {
            "qweight": mx.contiguous(words(integers, bits, in_turn).T),
            "qzeros": words(zeros.T - 1, bits, in_turn),
            "g_idx": mx.array(inputs // GROUP),
        }
    return own | {"scales": mx.contiguous(scales.T)}


def words(integers, bits, order):
    """Neighbours of a row in words, in this order."""
    own = integers.reshape(integers.shape[0], -1, len(order))
    packed = np.zeros(own.shape[:2], dtype=np.uint32)
    for place, lane in enumerate(order):
        packed |= own[..., lane] << np.uint32(place * bits)
    return mx.array(packed.view(np.int32))


def save(path, weights, types):
    """MLX has no arrays of these types: they are saved as bytes, and the header is written over."""
    mx.save_safetensors(str(path), {name: mx.contiguous(value) for name, value in weights.items()}, {"format": "pt"})
    saved = path.read_bytes()
    length = int.from_bytes(saved[:8], "little")
    header = json.loads(saved[8 : 8 + length])
    for name, kind in types.items():
        header[name]["dtype"] = kind
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + saved[8 + length :])
