"""Elementwise functions: dropout's hash, with the same bits as `dropout.py`, and activations with their slopes."""

import triton
import triton.language as tl


@triton.jit
def _mixed(h):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    return h


@triton.jit
def keys(seed_ptr, salt):
    seed = tl.load(seed_ptr)
    second = _mixed((seed >> 32).to(tl.uint32) ^ salt.to(tl.uint32))
    first = _mixed(seed.to(tl.uint32) + second)
    return first, _mixed(first ^ second)


@triton.jit
def kept(index, first, second, threshold):
    h = index.to(tl.uint32) * 0x9E3779B1 + first
    h ^= h >> 15
    h = (h * 0x7FEB352D) ^ second
    h ^= h >> 16
    h *= 0x846CA68B
    return (h >> 8).to(tl.int32) >= threshold


@triton.jit
def sigmoid(z):
    # a quarter fewer instructions than a division by 1 + exp(-z), which handles numbers that do not occur here
    r = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
    return r * r


@triton.jit
def _normal(u):
    # the normal distribution function, to 5e-7 in fp32 (from erf by Abramowitz and Stegun, 7.1.26), and exp(-u u / 2), a
    # by-product; half the instructions of erf, which executes both of its branches
    r = tl.rsqrt(1.0 + 0.231641888 * tl.abs(u))
    t = r * r
    e = tl.exp2(u * u * -0.7213475204444817)
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * e
    return tl.where(u < 0.0, tail, 1.0 - tail), e


@triton.jit
def gelu(u):
    below, _ = _normal(u)
    return u * below


@triton.jit
def gelu_slope(u):
    below, e = _normal(u)
    return below + u * 0.3989422804014327 * e
