"""Secrets that a job names by reference, resolved on its nodes.

``weft launch`` puts only references into what it submits.  Kubernetes and SkyPilot insert their own
secrets; those of AWS Secrets Manager are read here, once per node, with the credentials of the
node's role, before anything that needs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping

from weft.config.errors import ConfigError, InvalidConfig

REFERENCES_VARIABLE = "WEFT_SECRETS"  # NAME -> ID[#FIELD], as JSON


def encode_references(references: Mapping[str, str]) -> str:
    """Return the value of `REFERENCES_VARIABLE`."""
    return json.dumps(dict(references), separators=(",", ":"))


def resolve_secrets(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that `REFERENCES_VARIABLE` names, and remove it.

    A variable that is set already stays: a process inherits it from one that has resolved it.

    Raises:
        InvalidConfig: if a secret cannot be read; its value is in no message.
    """
    references = json.loads(environment.pop(REFERENCES_VARIABLE, "{}"))
    missing = {name: text for name, text in references.items() if name not in environment}
    if not missing:
        return
    errors = []
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import get_session
    except ImportError:
        rule = "are secrets of AWS Secrets Manager, and the image has no botocore"
        remedy = "pip install 'weft[s3]' in the image"
        raise InvalidConfig(
            [ConfigError("launch.secrets", ",".join(missing), rule, remedy)]
        ) from None
    remedy = "the role of the node needs secretsmanager:GetSecretValue on it"
    for name, reference in missing.items():
        id, _, field = reference.partition("#")
        # The ARN of a secret names its region.
        region = id.split(":")[3] if id.startswith("arn:") else None
        try:
            client = get_session().create_client("secretsmanager", region_name=region)
            text = client.get_secret_value(SecretId=id)["SecretString"]
            environment[name] = str(json.loads(text)[field]) if field else text
        except (BotoCoreError, ClientError) as error:
            errors.append(ConfigError(f"launch.secrets.{name}", reference, f"{error}", remedy))
        except (KeyError, ValueError, TypeError):
            rule = f"has no field {field}" if field else "is not text"
            errors.append(
                ConfigError(f"launch.secrets.{name}", reference, rule, "use another field")
            )
    if errors:
        raise InvalidConfig(errors)
