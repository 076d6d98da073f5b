"""A software bill of materials: SPDX 2.3 as JSON, from the control files of Debian packages."""

import datetime
import json
import re


def _field(control, name):
    found = re.search(rf"^{name}: (.*)$", control, re.M)
    return found.group(1) if found else ""


def _identifier(text):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", text)


def _package(name, version, supplier, purl, licence):
    return {
        "SPDXID": _identifier(f"Package-{name}"), "name": name, "versionInfo": version,
        "supplier": supplier, "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION", "licenseDeclared": licence,
        "copyrightText": "NOASSERTION",
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                          "referenceLocator": purl}]}


def document(product, version, revision, seconds, controls, licence):
    """The document of `product`, which contains the packages of these control files.

    `seconds`: the time of creation, since 1970. The same arguments give the same text.
    """
    time = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    root = _package(product, version, "Organization: mla-server developers",
                    f"pkg:generic/{product}@{version}?vcs_revision={revision}", licence)
    packages = [root]
    for control in sorted(controls, key=lambda text: _field(text, "Package")):
        name, number = _field(control, "Package"), _field(control, "Version")
        packages.append(_package(
            name, number, f"Organization: {_field(control, 'Maintainer')}",
            f"pkg:deb/debian/{name}@{number}?arch={_field(control, 'Architecture')}",
            "NOASSERTION"))
    relations = [{"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES",
                  "relatedSpdxElement": root["SPDXID"]}]
    relations += [{"spdxElementId": root["SPDXID"], "relationshipType": "CONTAINS",
                   "relatedSpdxElement": package["SPDXID"]} for package in packages[1:]]
    whole = {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{product}-{version}",
        "documentNamespace": f"urn:spdx:{product}-{version}-{revision}",
        "creationInfo": {"created": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
                         "creators": ["Tool: deploy/package/sbom.py"]},
        "packages": packages, "relationships": relations}
    return json.dumps(whole, indent=1) + "\n"
