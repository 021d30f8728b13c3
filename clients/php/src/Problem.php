<?php

declare(strict_types=1);

namespace Tidegate;

/**
 * The body of a refusal as an RFC 9457 problem document.
 *
 * @internal
 */
final class Problem
{
    public const CONTENT_TYPE = 'application/problem+json';
    private const TYPES = 'https://iana.org/assignments/http-problem-types#';

    /**
     * Returns whether an Accept header asks for a problem: it must name the type, with a weight above 0 and not below
     * that of application/json.
     */
    public static function isAskedForBy(string $accept): bool
    {
        $weights = [self::CONTENT_TYPE => 0.0, 'application/json' => 0.0];
        foreach (explode(',', $accept) as $range) {
            $parameters = explode(';', $range);
            $name = strtolower(trim(array_shift($parameters)));
            if (isset($weights[$name])) {
                $weights[$name] = max($weights[$name], self::weight($parameters));
            }
        }
        return $weights[self::CONTENT_TYPE] > 0.0 && $weights[self::CONTENT_TYPE] >= $weights['application/json'];
    }

    /**
     * @param array<string, mixed> $fields of the body in JSON
     * @return array<string, mixed>
     */
    public static function of(Decision $decision, array $fields): array
    {
        [$type, $title] = $decision->reason === Decision::UNAVAILABLE
            ? ['temporary-reduced-capacity', 'The rate limiter is temporarily unavailable']
            : ['quota-exceeded', 'Quota exceeded'];
        $problem = [
            'type' => self::TYPES . $type,
            'title' => $title,
            'status' => $decision->statusCode(),
            'detail' => $fields['message'] ?? $title,
        ];
        $violated = array_filter($decision->limits, static fn (LimitStatus $status) => !$status->allowed);
        if ($violated !== []) {
            $problem['violated-policies'] = array_values(array_map(static fn (LimitStatus $status) => $status->name, $violated));
        }
        return $problem + array_diff_key($fields, ['error' => true, 'message' => true]);
    }

    /**
     * Returns the weight in the parameters of a media type: 1 without q, 0 if its value is invalid.
     *
     * @param list<string> $parameters
     */
    private static function weight(array $parameters): float
    {
        foreach ($parameters as $parameter) {
            [$name, $value] = explode('=', $parameter, 2) + [1 => null];
            if ($value !== null && strtolower(trim($name)) === 'q') {
                $value = trim($value);
                return preg_match('/^[01](\.[0-9]{0,3})?$/D', $value) === 1 ? min((float) $value, 1.0) : 0.0;
            }
        }
        return 1.0;
    }
}
