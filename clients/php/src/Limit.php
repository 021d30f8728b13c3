<?php

declare(strict_types=1);

namespace Tidegate;

use Tidegate\Exception\Invalid;

/** A limit: at most `quota` units per window, by an algorithm. All values are in range. */
final class Limit
{
    private const TEXT_BYTES_MAX = 256;
    private const QUOTA_MAX = 10_000_000;
    private const SLIDING_LOG_QUOTA_MAX = 100_000;
    private const WINDOW_US_MIN = 1_000;
    private const WINDOW_US_MAX = 400 * 86_400 * 1_000_000;
    private const EXAMPLE = 'for example 10/min or 100/min token-bucket burst=20';
    private const ALGORITHMS = ['sliding', 'sliding-log', 'sliding-counter', 'fixed-window', 'token-bucket', 'leaky-bucket'];
    private const CAPACITY_OPTIONS = ['token-bucket' => 'burst', 'leaky-bucket' => 'queue'];
    private const UNITS_US = [
        'week' => 604_800_000_000, 'weeks' => 604_800_000_000, 'w' => 604_800_000_000,
        'day' => 86_400_000_000, 'days' => 86_400_000_000, 'd' => 86_400_000_000,
        'h' => 3_600_000_000, 'hr' => 3_600_000_000, 'hour' => 3_600_000_000, 'hours' => 3_600_000_000,
        'min' => 60_000_000, 'mins' => 60_000_000, 'minute' => 60_000_000, 'minutes' => 60_000_000, 'm' => 60_000_000,
        's' => 1_000_000, 'sec' => 1_000_000, 'secs' => 1_000_000, 'second' => 1_000_000, 'seconds' => 1_000_000,
        'ms' => 1_000, 'us' => 1, 'µs' => 1,
    ];

    private function __construct(
        public readonly string $algorithm,
        public readonly int $quota,
        public readonly int $windowUs,
        /** The burst or queue; the quota for algorithms that have neither. */
        public readonly int $capacity,
        public readonly bool $countDenied,
    ) {
    }

    /**
     * Parses `QUOTA/WINDOW [ALGORITHM] [option=value …]`.
     *
     * @throws Invalid if the text is not a limit; the message says what is expected
     */
    public static function parse(string $text): self
    {
        try {
            return self::parseExactly($text);
        } catch (Invalid $error) {
            $meant = self::meant($text);
            throw $meant === null ? $error : new Invalid($error->getMessage() . "; did you mean $meant?");
        }
    }

    private static function parseExactly(string $text): self
    {
        if (strlen($text) > self::TEXT_BYTES_MAX) {
            throw new Invalid(sprintf('a limit can have at most %d bytes, but this one has %d; %s', self::TEXT_BYTES_MAX, strlen($text), self::EXAMPLE));
        }
        $words = self::words($text);
        if ($words === []) {
            throw new Invalid('expected QUOTA/WINDOW, found nothing; ' . self::EXAMPLE);
        }
        [$quota, $windowUs] = self::parseRate(array_shift($words));
        $algorithm = 'sliding';
        if ($words !== [] && !str_contains($words[0], '=')) {
            $algorithm = array_shift($words);
        }
        if (!in_array($algorithm, self::ALGORITHMS, true)) {
            throw new Invalid('unknown algorithm ' . Invalid::shown($algorithm) . '; expected one of ' . implode(', ', self::ALGORITHMS));
        }
        if ($algorithm === 'sliding-log' && $quota > self::SLIDING_LOG_QUOTA_MAX) {
            throw new Invalid(sprintf('a quota must be from 1 to %d for sliding-log, found %d', self::SLIDING_LOG_QUOTA_MAX, $quota));
        }
        $options = self::parseOptions($words, $algorithm);
        return new self($algorithm, $quota, $windowUs, $options['capacity'] ?? $quota, $options['count_denied'] ?? false);
    }

    /** Returns the limit line of the script, for a counter whose window is part of its key. */
    public function line(int $cost): string
    {
        $line = "$this->algorithm $this->quota $this->windowUs $cost";
        if ($this->capacity !== $this->quota) {
            $line .= ' ' . self::CAPACITY_OPTIONS[$this->algorithm] . "=$this->capacity";
        }
        return $line . ($this->countDenied ? ' count_denied=1' : '') . ' window=fixed';
    }

    /** Returns a window in words, in the largest unit that divides it: `per minute`, `per 10 seconds`. */
    public static function period(int $windowUs): string
    {
        $units = [
            ['week', 'weeks', 604_800_000_000], ['day', 'days', 86_400_000_000], ['hour', 'hours', 3_600_000_000],
            ['minute', 'minutes', 60_000_000], ['second', 'seconds', 1_000_000], ['ms', 'ms', 1_000],
        ];
        foreach ($units as [$one, $many, $unitUs]) {
            if ($windowUs % $unitUs === 0) {
                $count = intdiv($windowUs, $unitUs);
                return $count === 1 ? "per $one" : "per $count $many";
            }
        }
        return "per $windowUs us";
    }

    /** @return list<string> the parts between ASCII white space */
    private static function words(string $text): array
    {
        return preg_split('/[ \t\n\f\r]+/', $text, -1, PREG_SPLIT_NO_EMPTY) ?: [];
    }

    /**
     * Returns the limit that a text in another common form means, as it must be written: `10/min` for `10 / min`, `10 per minute` or `10/MIN`, and `10/90min`
     * for `10/1.5h`. Returns null if the text has another form, or that limit would be invalid.
     */
    private static function meant(string $text): ?string
    {
        if (strlen($text) > self::TEXT_BYTES_MAX) {
            return null;
        }
        $words = self::words(str_replace('/', ' / ', strtolower($text)));
        if (count($words) < 3 || !in_array($words[1], ['/', 'per'], true)) {
            return null;
        }
        [$quota, , $window] = $words;
        $rest = array_slice($words, 3);
        if ($rest !== [] && trim($window, '0123456789.') === '') {
            $window .= array_shift($rest);
        }
        $windowUs = self::fractionalWindowUs($window);
        if ($windowUs === null) {
            return null;
        }
        $limit = implode(' ', [$quota . '/' . self::windowText($windowUs), ...$rest]);
        try {
            self::parseExactly($limit);
        } catch (Invalid) {
            return null;
        }
        return $limit;
    }

    /** Parses a window whose number may have a fraction, such as `1.5h`. Returns null if it is not a whole number of microseconds. */
    private static function fractionalWindowUs(string $window): ?int
    {
        $isWindow = preg_match('/^([0-9]*)(?:\.([0-9]{1,3}))?([^0-9.]+)$/D', $window, $parts) === 1;
        $unitUs = $isWindow ? self::UNITS_US[$parts[3]] ?? null : null;
        if ($unitUs === null || $parts[1] . $parts[2] === '') {
            return $unitUs;
        }
        // The maximum of the whole number excludes an overflow.
        $whole = self::digits($parts[1] === '' ? '0' : $parts[1], intdiv(self::WINDOW_US_MAX, $unitUs));
        $fractionUs = (int) $parts[2] * $unitUs;
        $divisor = 10 ** strlen($parts[2]);
        return $whole === null || $fractionUs % $divisor !== 0 ? null : $whole * $unitUs + intdiv($fractionUs, $divisor);
    }

    /** Returns a window in the largest unit that divides it: `min`, `90min`, `500ms`. */
    private static function windowText(int $windowUs): string
    {
        foreach (self::UNITS_US as $unit => $unitUs) {
            if ($windowUs >= $unitUs && $windowUs % $unitUs === 0) {
                return ($windowUs === $unitUs ? '' : (string) intdiv($windowUs, $unitUs)) . $unit;
            }
        }
        return "{$windowUs}us";
    }

    /** @return array{int, int} the quota and the window in microseconds */
    private static function parseRate(string $word): array
    {
        $parts = explode('/', $word, 2);
        if (count($parts) < 2) {
            throw new Invalid('expected a / between quota and window, found ' . Invalid::shown($word) . '; ' . self::EXAMPLE);
        }
        $quota = self::digits($parts[0], self::QUOTA_MAX);
        if ($quota === null || $quota < 1) {
            throw new Invalid(sprintf('expected a quota from 1 to %d in digits, found %s; %s', self::QUOTA_MAX, Invalid::shown($parts[0]), self::EXAMPLE));
        }
        $unit = ltrim($parts[1], '0123456789');
        $count = substr($parts[1], 0, strlen($parts[1]) - strlen($unit));
        if ($unit === '') {
            throw new Invalid('expected a window: a whole number and a unit, or a unit alone (500ms, 10s, min, day), found ' . Invalid::shown($parts[1]));
        }
        if (preg_match('/^\.[0-9]/', $unit) === 1) {
            throw new Invalid('expected a window in whole numbers, such as 90min, found ' . Invalid::shown($parts[1]));
        }
        if (!isset(self::UNITS_US[$unit])) {
            throw new Invalid('unknown unit of time ' . Invalid::shown($unit) . '; expected one of us, ms, s, min, h, day, week');
        }
        // The maximum of the count excludes an overflow.
        $number = $count === '' ? 1 : self::digits($count, intdiv(self::WINDOW_US_MAX, self::UNITS_US[$unit]));
        if ($number === null || $number * self::UNITS_US[$unit] < self::WINDOW_US_MIN) {
            $reason = $number === null ? ', the longest whose arithmetic is exact in Redis' : '';
            throw new Invalid("a window must be from 1ms to 400day$reason, found " . Invalid::shown($parts[1]));
        }
        return [$quota, $number * self::UNITS_US[$unit]];
    }

    /**
     * @param list<string> $words
     * @return array{capacity?: int, count_denied?: bool}
     */
    private static function parseOptions(array $words, string $algorithm): array
    {
        $options = [];
        foreach ($words as $word) {
            [$name, $value] = explode('=', $word, 2) + [1 => null];
            if ($value === null || !in_array($name, ['burst', 'queue', 'count_denied'], true)) {
                throw new Invalid('unknown option ' . Invalid::shown($word) . '; expected one of burst=N, queue=N, count_denied=true|false');
            }
            $field = $name === 'count_denied' ? $name : 'capacity';
            if ($field === 'capacity' && $name !== (self::CAPACITY_OPTIONS[$algorithm] ?? null)) {
                throw new Invalid("$name is not an option of $algorithm");
            }
            if (isset($options[$field])) {
                throw new Invalid("the option $name is given twice");
            }
            if ($field === 'count_denied') {
                if ($value !== 'true' && $value !== 'false') {
                    throw new Invalid('expected count_denied=true or count_denied=false, found ' . Invalid::shown($word));
                }
                $options[$field] = $value === 'true';
                continue;
            }
            $options[$field] = self::digits($value, self::QUOTA_MAX);
            if ($options[$field] === null || $options[$field] < 1) {
                throw new Invalid(sprintf('expected %s=N with N from 1 to %d, in digits, found %s', $name, self::QUOTA_MAX, Invalid::shown($word)));
            }
        }
        return $options;
    }

    /** Parses a decimal number from 0 to $max; null for any other text. */
    private static function digits(string $text, int $max): ?int
    {
        if ($text === '' || strspn($text, '0123456789') !== strlen($text)) {
            return null;
        }
        $significant = ltrim($text, '0');
        return strlen($significant) <= 18 && (int) $significant <= $max ? (int) $significant : null;
    }
}
