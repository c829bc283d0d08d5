"""Passwords and tokens within addresses, which are never shown or stored."""

import re

_USER = re.compile(r"(?<=//)[^/@\s]*:[^/@\s]*@")
_PARAMETER = re.compile(
    r"([?&](?:[\w-]*(?:token|signature|passw|secret|credential|key)[\w-]*|sig|auth)=)[^&#\s]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Return the text without users and passwords, and tokens in parameters, of its addresses."""
    return _PARAMETER.sub(r"\1…", _USER.sub("", text))
