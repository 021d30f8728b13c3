<?php

declare(strict_types=1);

namespace Tidegate;

/** A response that the rules of the service determine: on a refusal all of it, on an admission the headers to add. */
final class Response
{
    /** @param array<string, string> $headers */
    public function __construct(
        public readonly int $status,
        public readonly array $headers,
        public readonly string $body,
    ) {
    }
}
