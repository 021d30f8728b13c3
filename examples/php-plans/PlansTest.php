<?php

declare(strict_types=1);

namespace Tidegate\Examples;

use PHPUnit\Framework\TestCase;

/** Starts `tidegate serve` and the service, and checks each plan from outside. Run it with `phpunit PlansTest.php`. */
final class PlansTest extends TestCase
{
    /** @var list<resource> */
    private array $processes = [];
    /** @var list<resource> kept open, so that the programs can write to them */
    private array $outputs = [];

    protected function tearDown(): void
    {
        foreach ($this->processes as $process) {
            $this->kill($process);
        }
    }

    /** @param resource $process */
    private function kill($process): void
    {
        posix_kill(proc_get_status($process)['pid'], SIGKILL);
    }

    /**
     * Runs a program and returns the address that it prints.
     *
     * @param list<string> $command
     * @param array<string, string> $environment
     */
    private function start(array $command, array $environment = []): string
    {
        $process = proc_open($command, [['file', '/dev/null', 'r'], ['pipe', 'w'], ['redirect', 1]], $pipes, __DIR__, $environment + getenv());
        self::assertIsResource($process);
        $this->processes[] = $process;
        $output = '';
        while (($line = fgets($pipes[1])) !== false) {
            $output .= $line;
            if (preg_match('/127\.0\.0\.1:[1-9]\d*/', $line, $match) === 1) {
                $this->outputs[] = $pipes[1];
                return $match[0];
            }
        }
        self::fail("the program printed no address: $output");
    }

    /** @return array{int, array<string, string>, string} */
    private static function get(string $url, ?string $key): array
    {
        $options = ['ignore_errors' => true, 'header' => $key === null ? [] : ["x-api-key: $key"]];
        $body = (string) file_get_contents($url, false, stream_context_create(['http' => $options]));
        $headers = [];
        foreach (array_slice($http_response_header, 1) as $line) {
            [$name, $value] = explode(':', $line, 2);
            $headers[strtolower($name)] = trim($value);
        }
        return [(int) explode(' ', $http_response_header[0])[1], $headers, $body];
    }

    public function testEachCallerHasTheLimitsOfItsPlan(): void
    {
        $tidegate = getenv('TIDEGATE_BIN') ?: __DIR__ . '/../../target/debug/tidegate';
        $limiter = $this->start([$tidegate, 'serve', '--config', 'tidegate.toml', '--http', '127.0.0.1:0', '--resp', 'off', '--admin', 'off', '--store', 'memory']);
        $url = 'http://' . $this->start([PHP_BINARY, '-S', '127.0.0.1:0', 'index.php'], ['TIDEGATE_URL' => "http://$limiter"]) . '/v1/hello';
        $send = static function (?string $key) use ($url): array {
            $answers = array_map(static fn () => self::get($url, $key), range(1, 10));
            return [count(array_filter($answers, static fn (array $answer) => $answer[0] === 200)), end($answers)];
        };

        [$admitted, [$status]] = $send(null);
        self::assertSame([3, 429], [$admitted, $status], 'anonymous');

        [$admitted, [$status, $headers, $body]] = $send('demo-free-key');
        $refusal = json_decode($body, true);
        self::assertSame([5, 429, '5', 'no-store'], [$admitted, $status, $headers['x-ratelimit-limit'], $headers['cache-control']], 'free');
        self::assertArrayHasKey('retry-after', $headers);
        self::assertSame(['rate_limited', 'free', 'https://example.com/plans'], [$refusal['error'], $refusal['plan'], $refusal['upgrade_url']]);

        [$admitted, [, $headers, $body]] = $send('demo-pro-key');
        self::assertSame([10, '590', "hello, 590 of 600 left\n"], [$admitted, $headers['x-ratelimit-remaining'], $body], 'pro');

        self::assertSame(0, $send('invented-key')[0], 'an invented key counts as anonymous');

        $this->kill($this->processes[0]);
        [$status, , $body] = self::get($url, 'demo-free-key');
        self::assertSame([200, "hello\n"], [$status, $body], 'without the service, requests are admitted');
    }
}
