"""Names and shapes of the tensors that DFlash2 drafters have and DFlash drafters do not."""


def added(vocab: int, hidden: int, layers: int, rank: int, taps: int, group: int) -> dict:
    """Names and shapes of the additional tensors of such a drafter."""
    selector = "candidate_selector"
    shapes = {
        f"{selector}.predecessor_codebook": (vocab, rank),
        f"{selector}.successor_codebook": (vocab, rank),
        f"{selector}.hidden_projection.weight": (rank, hidden),
    }
    for layer in range(layers):
        for sublayer in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{sublayer}"
            shapes[f"{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
    return shapes
