<?php

declare(strict_types=1);

namespace Tidegate\Tests;

/** Starts the servers that the tests use, and reads the vectors that all clients replay. */
final class Servers
{
    public const ROOT = __DIR__ . '/../../..';
    private const PATIENCE_SECONDS = 30;

    /** @return array<string, mixed> */
    public static function vectors(): array
    {
        return json_decode((string) file_get_contents(__DIR__ . '/../../vectors.json'), true, flags: JSON_THROW_ON_ERROR);
    }

    /** Starts `tidegate serve` and returns it with the address of its HTTP listener. */
    public static function tidegate(string $address = '127.0.0.1:0', string ...$options): array
    {
        $binary = getenv('TIDEGATE_BIN') ?: self::ROOT . '/target/debug/tidegate';
        if (!is_file($binary)) {
            throw new \RuntimeException('the tidegate binary is missing: set TIDEGATE_BIN, or run cargo build -p tidegate-cli');
        }
        $command = [$binary, 'serve', '--http', $address, '--resp', 'off', '--admin', 'off', ...$options];
        $process = new Process($command, ['TIDEGATE_STORE' => 'memory']);
        return [$process, $process->awaitOutput('/^\s*http\s+(127\.0\.0\.1:\d+)/')];
    }

    /** Starts a Redis server without persistence on this Unix socket. */
    public static function redis(string $socket, string ...$options): Process
    {
        return self::store('redis-server', $socket, ...$options);
    }

    /** Starts a redis-server or valkey-server without persistence on this Unix socket. */
    public static function store(string $program, string $socket, string ...$options): Process
    {
        $local = self::ROOT . "/.tools/bin/$program";
        $binary = is_file($local) ? $local : $program;
        @unlink($socket);
        $process = new Process([$binary, '--port', '0', '--unixsocket', $socket, '--save', '', '--dir', dirname($socket), ...$options]);
        self::eventually("$program to accept connections", static fn () => @stream_socket_client("unix://$socket") !== false);
        return $process;
    }

    /**
     * Starts a Redis or Valkey Cluster of three masters.
     *
     * Lines that are written to the process change the slot of a key, and are answered with ok: begin-move KEY, end-move
     * KEY, drop-slot KEY, restore-slot KEY.
     */
    public static function startCluster(string $brand): Process
    {
        $binary = self::ROOT . '/target/debug/tidegate-test-cluster';
        if (!is_file($binary)) {
            throw new \RuntimeException("$binary is missing: cargo build -p tidegate-testkit");
        }
        return new Process([$binary, $brand]);
    }

    /**
     * Waits until a cluster serves all slots, and returns the addresses of its masters.
     *
     * @return list<string>
     */
    public static function addresses(Process $cluster): array
    {
        return explode(' ', $cluster->awaitOutput('/^(127\.0\.0\.1:.*)$/'));
    }

    /** Returns the path of a Unix socket in a directory of its own. */
    public static function socket(): string
    {
        $directory = sys_get_temp_dir() . '/tidegate' . bin2hex(random_bytes(8));
        mkdir($directory);
        register_shutdown_function(static function () use ($directory): void {
            @unlink("$directory/s");
            @rmdir($directory);
        });
        return "$directory/s";
    }

    /** Starts fake_service.php and returns it with its URL. */
    public static function fake(string $mode, int $status = 200, string $body = '', string $log = '/dev/null'): array
    {
        $process = new Process([PHP_BINARY, __DIR__ . '/fake_service.php', $mode, (string) $status, $log, $body]);
        return [$process, $process->awaitOutput('/^(http:.*)$/')];
    }

    /** @param callable(): bool $condition */
    public static function eventually(string $what, callable $condition): void
    {
        for ($end = time() + self::PATIENCE_SECONDS; !$condition(); usleep(5_000)) {
            if (time() > $end) {
                throw new \RuntimeException("timed out waiting for $what");
            }
        }
    }
}
