"""What the documents promise is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def test_every_code_in_the_troubleshooting_page_is_a_code_of_the_library() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    codes = set(re.findall(r"\[([a-z_]+\.[a-z_]+)\]", page))
    assert len(codes) >= 10
    mismatches = {f"incompatible.{what}" for what in re.findall(r'_differs\("(\w+)"', source)}
    assert [code for code in sorted(codes - mismatches) if f'"{code}"' not in source] == []


def test_the_ten_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    embedding = torch.nn.Embedding(100, 8)
    model = torch.nn.ModuleDict({"tok_emb": embedding})
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names: dict[str, object] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 700}
    code = example.replace('view["model/tok_emb.weight"][10:20]', 'rows = view["model/tok_emb.weight"][10:20]')
    exec(code, names)
    rows = names["rows"]
    assert isinstance(rows, torch.Tensor)
    assert torch.equal(rows, embedding.weight[10:20])


def test_links_between_documents_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
