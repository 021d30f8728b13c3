<?php

declare(strict_types=1);

namespace Tidegate;

use Tidegate\Exception\TidegateException;

/** The answer to a check. */
final class Decision
{
    public const RATE_LIMITED = 'rate_limited';
    public const BANNED = 'banned';
    public const UNAVAILABLE = 'unavailable';

    /** The quota of the most restrictive limit; 0 if nothing was counted. */
    public readonly int $limit;
    /** The remaining units of the most restrictive limit. */
    public readonly int $remaining;
    /**
     * The seconds until a denied request would be admitted; null for never. For an admission it is 0, except with
     * leaky-bucket, where it is the time to wait before going on.
     */
    public readonly ?float $retryAfter;
    /** The seconds until the most restrictive limit is whole again; null for never. */
    public readonly ?float $resetAfter;
    public readonly int $retryAfterUs;

    /**
     * @param string $source store, deny_cache, local or none (nothing was counted)
     * @param ?string $reason of a refusal: rate_limited, banned or unavailable; null for an admission
     * @param list<LimitStatus> $limits one per demand, in the same order; by rules one per limit that applies
     * @param ?int $retryAfterUs overrides the wait of the limits; -1 is never
     * @param ?Response $response the response by the rules of the service; null for other decisions
     * @param ?TidegateException $error the failure that prevented a decision
     * @param array<string, mixed> $body the fields of the body of a refusal by the service
     * @param ?array<string, string> $rateLimitHeaders of the service; null to compute them
     */
    public function __construct(
        public readonly bool $allowed,
        public readonly string $source,
        public readonly ?string $reason = null,
        public readonly array $limits = [],
        ?int $retryAfterUs = null,
        public readonly ?Response $response = null,
        public readonly ?TidegateException $error = null,
        private readonly ?int $atUs = null,
        private readonly array $body = [],
        private readonly ?array $rateLimitHeaders = null,
        private readonly ?Refund $refund = null,
    ) {
        $strictest = LimitStatus::strictest($limits);
        $this->limit = $strictest?->quota ?? 0;
        $this->remaining = $strictest?->remaining ?? 0;
        $this->resetAfter = self::seconds($strictest?->resetAfterUs ?? 0);
        $waitUs = 0;
        foreach ($limits as $status) {
            if ($status->allowed === $allowed && LimitStatus::isLonger($status->retryAfterUs, $waitUs)) {
                $waitUs = $status->retryAfterUs;
            }
        }
        $this->retryAfterUs = $retryAfterUs ?? $waitUs;
        $this->retryAfter = self::seconds($this->retryAfterUs);
    }

    /** Returns the HTTP status: 200, 429 for a denial, 403 for a ban, 503 without a verdict; by rules that of the response. */
    public function statusCode(): int
    {
        return match (true) {
            $this->allowed => 200,
            $this->response !== null => $this->response->status,
            $this->reason === self::BANNED => 403,
            $this->reason === self::UNAVAILABLE => 503,
            default => 429,
        };
    }

    /**
     * Returns the headers of a response with this decision: the rate-limit headers, and on a refusal Retry-After,
     * Cache-Control and Content-Type. By rules, they are those of the response.
     *
     * @param string $accept the request's Accept, which must also be passed to body()
     * @return array<string, string>
     */
    public function headers(string $accept = ''): array
    {
        if ($this->response !== null) {
            return $this->response->headers;
        }
        $headers = $this->rateLimitHeaders ?? $this->computedHeaders();
        if (!$this->allowed) {
            $headers['cache-control'] = 'no-store';
            $headers['content-type'] = Problem::isAskedForBy($accept) ? Problem::CONTENT_TYPE : 'application/json';
            if ($this->retryAfterUs !== LimitStatus::NEVER) {
                $headers['retry-after'] = (string) max(self::ceilDiv($this->retryAfterUs, 1_000_000), 1);
            }
        }
        return $headers;
    }

    /**
     * Returns the body of a refusal: JSON, or an RFC 9457 problem document if the request's Accept asks for it. By rules,
     * it is that of the response.
     */
    public function body(string $accept = ''): string
    {
        if ($this->response !== null) {
            return $this->response->body;
        }
        $fields = $this->body !== [] ? $this->body : $this->refusalFields();
        if (Problem::isAskedForBy($accept)) {
            $fields = Problem::of($this, $fields);
        }
        return json_encode($fields, JSON_UNESCAPED_SLASHES | JSON_UNESCAPED_UNICODE | JSON_THROW_ON_ERROR);
    }

    /** Returns whether the rules give units back for a response with this status: below 400 is a success. */
    public function refundsOn(int $status): bool
    {
        return in_array($status < 400 ? 'success' : 'failure', $this->refund?->endings ?? [], true);
    }

    /** @internal */
    public function refundData(): ?Refund
    {
        return $this->refund;
    }

    /**
     * Returns this decision as a denial that charged nothing, for a place in a leaky bucket that is too far back.
     *
     * @internal
     */
    public function asDenial(): self
    {
        return new self(false, $this->source, self::RATE_LIMITED, $this->limits, $this->retryAfterUs, atUs: $this->atUs);
    }

    /**
     * Returns this decision after its wait.
     *
     * @internal
     */
    public function withoutWait(): self
    {
        return new self($this->allowed, $this->source, null, $this->limits, 0, atUs: $this->atUs, refund: $this->refund);
    }

    /** @return array<string, string> the styles `x`, for the most restrictive limit, and `ietf`, for all */
    private function computedHeaders(): array
    {
        $strictest = LimitStatus::strictest($this->limits);
        if ($strictest === null || $this->atUs === null || $this->source === 'none') {
            return [];
        }
        $headers = ['x-ratelimit-limit' => (string) $strictest->quota, 'x-ratelimit-remaining' => (string) $strictest->remaining];
        if ($strictest->untilNextUs() !== LimitStatus::NEVER) {
            // Added before it is rounded, so that the same instant is the same second in all responses.
            $headers['x-ratelimit-reset'] = (string) self::ceilDiv($this->atUs + $strictest->untilNextUs(), 1_000_000);
        }
        $policies = $limits = [];
        foreach ($this->limits as $status) {
            $window = $status->windowUs % 1_000_000 === 0 ? ';w=' . intdiv($status->windowUs, 1_000_000) : '';
            $policies[] = "\"$status->name\";q=$status->quota$window";
            $waitUs = $status->untilNextUs();
            $wait = $waitUs === LimitStatus::NEVER ? '' : ';t=' . self::ceilDiv($waitUs, 1_000_000);
            $limits[] = "\"$status->name\";r=$status->remaining$wait";
        }
        return $headers + ['ratelimit-policy' => implode(', ', $policies), 'ratelimit' => implode(', ', $limits)];
    }

    /** @return array<string, mixed> */
    private function refusalFields(): array
    {
        $isNever = $this->retryAfterUs === LimitStatus::NEVER;
        $seconds = $isNever ? null : max(self::ceilDiv($this->retryAfterUs, 1_000_000), 1);
        $waits = ['retry_after' => $seconds, 'retry_after_ms' => $isNever ? null : max(self::ceilDiv($this->retryAfterUs, 1_000), 1)];
        $status = LimitStatus::strictest($this->limits);
        $message = match (true) {
            $this->reason === self::BANNED => 'this caller is banned',
            $this->reason === self::UNAVAILABLE => 'the rate limiter is temporarily unavailable; try again shortly',
            $status === null => 'too many requests',
            default => null,
        };
        if ($message !== null || $status === null) {
            return ['error' => $this->reason, 'message' => $message] + $waits;
        }
        $limit = $status->quota . ' ' . Limit::period($status->windowUs);
        $message = match ($seconds) {
            null => "a request that costs $status->cost can never pass: the limit is $limit, at most $status->capacity at once",
            1 => "the limit of $limit has been reached; try again in 1 second",
            default => "the limit of $limit has been reached; try again in $seconds seconds",
        };
        return ['error' => $this->reason, 'message' => $message, 'limit' => $status->quota] + $waits + ['policy' => $status->name];
    }

    private static function seconds(int $us): ?float
    {
        return $us === LimitStatus::NEVER ? null : $us / 1_000_000;
    }

    private static function ceilDiv(int $number, int $divisor): int
    {
        return intdiv($number + $divisor - 1, $divisor);
    }
}
