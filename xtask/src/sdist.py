"""Fetches a part of a source distribution, without building anything, as pip would.

    sdist.py PACKAGE VERSION SHA256 PART FOLDER

Files whose paths in the archive begin with PART come into FOLDER. The index is pip's own.
"""

import hashlib
import html
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request


def main(package, version, sha256, part, folder):
    index = os.environ.get("PIP_INDEX_URL") or configured() or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/{package}/"
    name = f"{package.replace('-', '_')}-{version}"
    with urllib.request.urlopen(page, timeout=180) as answer:
        links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', answer.read().decode())]
    found = [link for link in links if urllib.parse.urlparse(link).path.endswith(f"/{name}.tar.gz")]
    assert found, f"{page} has no {name}.tar.gz"
    with tempfile.TemporaryFile() as file:
        digest = hashlib.sha256()
        with urllib.request.urlopen(urllib.parse.urljoin(page, found[0]), timeout=180) as answer:
            while block := answer.read(1 << 20):
                digest.update(block)
                file.write(block)
        assert digest.hexdigest() == sha256, f"{name}.tar.gz has other bytes than those that were tested"
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            for member in archive:
                own = member.name.removeprefix(f"{name}/{part}/")
                if own != member.name and member.isfile():
                    member.name = own
                    archive.extract(member, folder, filter="data")


def configured():
    """The index of pip's configuration, if it names one."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else None


main(*sys.argv[1:])
