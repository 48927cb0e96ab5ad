"""The body of a request, within limits of size and time."""

import asyncio

from server.openai.api_error import ApiError

MAX_BYTES = 16 << 20
# So much more of a body that is too large is read and dropped, so that the client has sent all before it is told.
MAX_DROPPED = 8 * MAX_BYTES
SECONDS = 60


async def read_body(request):
    """-> its bytes. ApiError 413 when there are too many, 408 when they do not come; Starlette's ClientDisconnect."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_BYTES:
                    parts.append(part)
                elif size > MAX_DROPPED:
                    break
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {SECONDS} seconds", headers={"Connection": "close"}
        ) from None
    if size > MAX_BYTES:
        headers = {"Connection": "close"} if size > MAX_DROPPED else None
        raise ApiError(413, f"the body has more than {MAX_BYTES} bytes", code="body_too_large", headers=headers)
    return b"".join(parts)
