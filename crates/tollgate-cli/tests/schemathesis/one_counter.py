"""What JSON Schema cannot say: no two checks of one question may count on the same counter."""

import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance


@schemathesis.check
def valid_data_is_accepted(ctx, response, case):
    if response.status_code == 400 and "count on the same counter" in response.text:
        return None
    return positive_data_acceptance(ctx, response, case)
