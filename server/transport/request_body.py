"""The body of a request, within limits of size and time."""

import asyncio

from starlette.requests import Request

from server.openai.api_error import ApiError

MAX_BODY_BYTES = 16 << 20
# This much of a body that is too large is read and dropped, so that the client has sent all when the answer comes.
MAX_DROPPED_BYTES = 8 * MAX_BODY_BYTES
BODY_SECONDS = 60


async def read_body(request: Request) -> bytes:
    """ApiError 413 for a body that is too large, 408 for one that does not arrive; Starlette's ClientDisconnect."""
    chunks = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_BODY_BYTES:
                    chunks.append(chunk)
                elif size > MAX_DROPPED_BYTES:
                    break
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS} seconds"
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    if size > MAX_BODY_BYTES:
        headers = {"Connection": "close"} if size > MAX_DROPPED_BYTES else None
        message = f"the body has more than {MAX_BODY_BYTES} bytes; send a shorter request"
        raise ApiError(413, message, code="body_too_large", headers=headers)
    return b"".join(chunks)
