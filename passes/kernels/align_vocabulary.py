"""Logits of a vocabulary whose rows are not aligned get columns that nobody counts, in a lowered graph, in place.

                                                        padded = constant_pad_nd(weight, [0, 0, 0, 7])
    logits = mm(rows, permute(weight))                  whole = mm(rows, permute(padded))
    cross_entropy(logits, target)                  -->  cross_entropy(whole[:, :50257], target)
    grad = cross_entropy_backward(logits, ...)          grad = cross_entropy_backward(whole[:, :50257], ..., 50264)
    mm(grad, weight); mm(permute(grad), rows)           mm(grad, padded); mm(permute(grad), rows)[:50257]

Products whose rows are no multiple of 16 bytes run without the fast kernels of tensor cores, and what fills them up
around each product (as inductor does) copies all logits; a weight is filled up by the kernel that casts it.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.cross_entropy import aligned_columns
from autopar.passes.kernels.graph_patterns import dtype_of, name_of, shape_of
from autopar.passes.kernels.graph_writer import GraphWriter

aten, ours = torch.ops.aten, torch.ops.autopar
STATISTICS = (ours.cross_entropy.default, ours.cross_entropy_rows.default)


def align_vocabulary(graph: fx.Graph) -> None:
    """Fill up every vocabulary whose logits are read by a cross-entropy of ours and by nothing else."""
    write = GraphWriter(graph)
    for node in list(graph.nodes):
        if node.target is aten.mm.default and name_of(node.args[1]) == "permute":
            _align(write, node)
    write.erase_unread()


def _align(write: GraphWriter, logits: fx.Node) -> None:
    words, columns = shape_of(logits)[1], aligned_columns(shape_of(logits)[1], dtype_of(logits))
    statistics = [reader for reader in logits.users if reader.target in STATISTICS]
    gradients = [reader for reader in logits.users if reader.target is ours.cross_entropy_backward.default]
    products = [product for gradient in gradients for product in _products(gradient)]
    if columns == words or not statistics or {*statistics, *gradients} != {*logits.users}:
        return
    if any(product.target is not aten.mm.default or product.args[1] in gradients for product in products):
        return
    rows, turned = logits.args
    assert isinstance(turned, fx.Node)
    padded = write.made(aten.constant_pad_nd.default, (turned.args[0], [0, 0, 0, columns - words]), logits)
    whole = write.made(aten.mm.default, (rows, write.made(aten.permute.default, (padded, [1, 0]), logits)), logits)
    for reader in statistics:
        reader.replace_input_with(logits, write.made(aten.slice.Tensor, (whole, 1, 0, words), reader))
    for old in gradients:
        counted = write.made(aten.slice.Tensor, (whole, 1, 0, words), old)
        gradient = write.made(ours.cross_entropy_backward.default, (counted, *old.args[1:6], columns), old)
        for product in _products(old):
            _align_product(write, product, old, gradient)


def _products(gradient: fx.Node) -> list[fx.Node]:
    """Who reads a gradient of logits, also turned."""
    return [it for user in gradient.users for it in (user.users if name_of(user) == "permute" else (user,))]


def _align_product(write: GraphWriter, product: fx.Node, old: fx.Node, gradient: fx.Node) -> None:
    """The gradient of the rows, or that of the weight without the words that nobody counts."""
    left, right = product.args
    if left is old:
        further = shape_of(gradient)[1] - shape_of(old)[1]
        padded = write.made(aten.constant_pad_nd.default, (right, [0, 0, 0, further]), product)
        found = write.made(aten.mm.default, (gradient, padded), product)
    else:
        turned = write.made(aten.permute.default, (gradient, [1, 0]), product)
        whole = write.made(aten.mm.default, (turned, right), product)
        found = write.made(aten.slice.Tensor, (whole, 0, 0, shape_of(product)[0]), product)
    write.pass_on(product, found)
