<?php

declare(strict_types=1);

namespace Tidegate;

use Psr\Log\LoggerInterface;
use Tidegate\Exception\Forbidden;
use Tidegate\Exception\Invalid;
use Tidegate\Exception\Protocol;
use Tidegate\Exception\TidegateException;
use Tidegate\Exception\Unavailable;

/** Asks the service `tidegate serve` over HTTP. A long-running process keeps one connection open per client object. */
final class Client extends Limiter
{
    private const RATE_LIMIT_HEADERS = ['x-ratelimit-limit', 'x-ratelimit-remaining', 'x-ratelimit-reset', 'ratelimit', 'ratelimit-policy'];
    private const BODY_FIELDS = ['error', 'message', 'limit', 'retry_after', 'retry_after_ms', 'policy', 'rule', 'plan', 'upgrade_url'];

    private readonly HttpConnection $connection;
    private readonly FailurePolicy $failures;

    /**
     * @param string $url of the service, such as `http://127.0.0.1:8080`
     * @param float $deadline the deadline of each call in seconds, including connecting; a wait for units is added
     * @param string $onError what happens without a verdict: allow, deny (503) or raise
     * @param ?string $token the bearer token that the service requires
     * @param ?LoggerInterface $logger for failures, at most once a second; null for error_log
     * @param array<string, mixed> $tls context options of PHP's `ssl` streams, such as `cafile`
     * @throws Invalid if an argument is not accepted
     */
    public function __construct(
        string $url,
        private readonly float $deadline = 0.05,
        string $onError = FailurePolicy::ALLOW,
        private readonly ?string $token = null,
        ?LoggerInterface $logger = null,
        array $tls = [],
    ) {
        if (!($deadline > 0.0)) {
            throw new Invalid('expected a deadline above 0');
        }
        if ($token !== null && preg_match('/^[!-~]+$/D', $token) !== 1) {
            throw new Invalid('a token must consist of printable ASCII characters without spaces');
        }
        $this->connection = new HttpConnection($url, $tls);
        $this->failures = new FailurePolicy($onError, $logger);
    }

    public function checkAll(array $demands, bool $refundable = false, float $maxWait = 0.0): Decision
    {
        self::validate($demands, $maxWait);
        $checks = array_map(static fn (Demand $demand) => ['key' => $demand->key, 'limit' => $demand->limit, 'cost' => $demand->cost], $demands);
        $options = ($refundable ? ['receipt' => true] : []) + ($maxWait > 0.0 ? ['wait_ms' => (int) ceil(1000 * $maxWait)] : []);
        try {
            $body = json_encode(['checks' => $checks] + $options, JSON_UNESCAPED_SLASHES | JSON_THROW_ON_ERROR);
        } catch (\JsonException $exception) {
            throw new Invalid('keys and limits for the service must be valid UTF-8; the script accepts any bytes', 0, $exception);
        }
        return $this->decide($body, $this->deadline + $maxWait, array_map(static fn (Demand $demand) => $demand->cost, $demands));
    }

    /**
     * Decides a request by the rules of the service, which finds the client's address by its own trusted_proxies.
     *
     * @param string $path without the query
     * @param array<string, string|list<string>> $headers
     * @param string $peer the address of the connection's peer
     * @return Decision whose response is to be relayed: on a refusal all of it, on an admission its headers
     * @throws TidegateException as for {@see check()}
     */
    public function checkRequest(string $method, string $path, array $headers, string $peer): Decision
    {
        $lines = [];
        foreach ($headers as $name => $values) {
            foreach ((array) $values as $value) {
                $lines[] = [strtolower((string) $name), $value];
            }
        }
        $request = ['method' => $method, 'path' => $path, 'headers' => $lines, 'peer' => $peer];
        $flags = JSON_UNESCAPED_SLASHES | JSON_INVALID_UTF8_SUBSTITUTE | JSON_THROW_ON_ERROR;
        return $this->decide(json_encode(['request' => $request, 'receipt' => true], $flags), $this->deadline, []);
    }

    /**
     * {@inheritDoc}
     *
     * The check must have been refundable. After an exception the refund may be repeated: the service applies a receipt
     * only once.
     */
    public function refund(Decision $decision): void
    {
        $refund = $decision->refundData();
        if ($refund === null && $decision->allowed && $decision->source !== 'none' && $decision->limits !== []) {
            throw new Invalid('the decision has no receipt; pass refundable: true to the check');
        }
        $this->sendRefund($refund, []);
    }

    /**
     * Gives back what the rules say for a response with this status, for decisions of {@see checkRequest()}.
     *
     * @throws TidegateException if the refund failed
     */
    public function refundByStatus(Decision $decision, int $status): void
    {
        if ($decision->refundsOn($status)) {
            $this->sendRefund($decision->refundData(), ['status' => $status]);
        }
    }

    /** @param array<string, int> $options */
    private function sendRefund(?Refund $refund, array $options): void
    {
        if ($refund === null || $refund->receipt === '' || $refund->isDone) {
            return;
        }
        $body = json_encode(['receipt' => $refund->receipt] + $options, JSON_THROW_ON_ERROR);
        [$status, , $answer] = $this->connection->post('/v1/refund', $this->headers(), $body, $this->deadline);
        if ($status !== 200) {
            throw self::error($status, json_decode($answer, true));
        }
        $refund->isDone = true;
    }

    /** @param list<int> $costs */
    private function decide(string $body, float $seconds, array $costs): Decision
    {
        try {
            [$status, $headers, $text] = $this->connection->post('/v1/check', $this->headers(), $body, $seconds);
            return self::decision($status, $headers, json_decode($text, true), $costs);
        } catch (TidegateException $failure) {
            return $this->failures->apply($failure);
        }
    }

    /** @return list<string> */
    private function headers(): array
    {
        return $this->token === null ? [] : ["authorization: Bearer $this->token"];
    }

    /**
     * @param array<string, string> $headers
     * @param list<int> $costs
     */
    private static function decision(int $status, array $headers, mixed $answer, array $costs): Decision
    {
        $isDecision = in_array($status, [200, 429, 403, 503, 414], true) && is_array($answer) && is_bool($answer['allowed'] ?? null);
        if (!$isDecision || $answer['allowed'] !== ($status === 200)) {
            throw self::error($status, $answer);
        }
        $limits = [];
        foreach (self::arrayOf($answer, 'limits') as $index => $limit) {
            if (!is_array($limit) || !is_int($limit['quota'] ?? null) || !is_int($limit['remaining'] ?? null)) {
                throw new Protocol('the service returned a malformed limit');
            }
            $limits[] = new LimitStatus(
                (string) ($limit['name'] ?? ''),
                isset($limit['rule']) ? (string) $limit['rule'] : null,
                (bool) ($limit['allowed'] ?? false),
                $limit['quota'],
                1000 * (int) ($limit['window_ms'] ?? 0),
                $costs[$index] ?? 0,
                $limit['remaining'],
                self::us($limit['retry_after_ms'] ?? null),
                self::us($limit['next_after_ms'] ?? null),
                self::us($limit['reset_after_ms'] ?? null),
                $limit['quota'],
            );
        }
        $response = self::arrayOf($answer, 'response');
        $reason = $answer['error'] ?? [429 => Decision::RATE_LIMITED, 403 => Decision::BANNED, 503 => Decision::UNAVAILABLE][$status] ?? null;
        $receipt = $answer['receipt'] ?? null;
        return new Decision(
            $answer['allowed'],
            (string) ($answer['source'] ?? 'none'),
            $answer['allowed'] || $reason === null ? null : (string) $reason,
            $limits,
            array_key_exists('retry_after_ms', $answer) ? self::us($answer['retry_after_ms']) : null,
            $response === [] ? null : new Response((int) ($response['status'] ?? 200), array_map('strval', self::arrayOf($response, 'headers')), (string) ($response['body'] ?? '')),
            body: isset($answer['error']) ? array_intersect_key($answer, array_flip(self::BODY_FIELDS)) : [],
            rateLimitHeaders: array_intersect_key($headers, array_flip(self::RATE_LIMIT_HEADERS)),
            refund: is_string($receipt) ? new Refund($receipt, array_values(self::arrayOf($answer, 'refund_on'))) : null,
        );
    }

    /** @param array<mixed> $from */
    private static function arrayOf(array $from, string $name): array
    {
        return is_array($from[$name] ?? null) ? $from[$name] : [];
    }

    private static function us(mixed $ms): int
    {
        return is_int($ms) && $ms >= 0 ? 1000 * $ms : LimitStatus::NEVER;
    }

    /** Converts an answer that is not a decision to an exception. */
    private static function error(int $status, mixed $answer): TidegateException
    {
        $message = "the service answered $status";
        if (is_array($answer) && is_string($answer['message'] ?? null)) {
            $message .= ': ' . substr($answer['message'], 0, 256);
        }
        return match (true) {
            $status === 400, $status === 413, $status === 414 => new Invalid($message),
            $status === 401, $status === 403 => new Forbidden($message),
            $status >= 500, $status === 408, $status === 409, $status === 429 => new Unavailable($message),
            default => new Protocol($status === 200 ? 'the service returned an answer that is not a decision' : $message),
        };
    }
}
