<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use Nyholm\Psr7\Response;
use Nyholm\Psr7\ServerRequest;
use PHPUnit\Framework\TestCase;
use Psr\Http\Message\ResponseInterface;
use Psr\Http\Message\ServerRequestInterface;
use Psr\Http\Server\MiddlewareInterface;
use Psr\Http\Server\RequestHandlerInterface;

/** Runs the PHP blocks of the README, with the servers of the tests. */
final class ReadmeTest extends TestCase
{
    /** @return list<string> the service, Redis, a cluster, middleware */
    public static function blocks(): array
    {
        $readme = (string) file_get_contents(__DIR__ . '/../README.md');
        preg_match_all('/^```php\n(.*?)^```$/sm', $readme, $matches);
        return $matches[1];
    }

    /** ClusterTest runs the block of a cluster. */
    public function testEveryBlockHasATest(): void
    {
        self::assertCount(4, self::blocks());
    }

    public function testFirstProgramWorks(): void
    {
        [$service, $address] = Servers::tidegate();
        $program = str_replace(["127.0.0.1:8080'", '__DIR__'], ["$address', 30.0", var_export(dirname(__DIR__), true)], self::blocks()[0]);
        $run = static function () use ($program): string {
            $file = (string) tempnam(sys_get_temp_dir(), 'tidegate');
            file_put_contents($file, $program);
            $line = (new Process([PHP_BINARY, $file]))->awaitOutput('/^(.*)$/');
            unlink($file);
            return $line;
        };
        for ($left = 9; $left >= 0; $left--) {
            self::assertSame("$left of 10 left", $run());
        }
        self::assertMatchesRegularExpression('/^denied; retry in \d+(\.\d+)? seconds$/', $run());
    }

    public function testRedisAndMiddlewareBlocksWork(): void
    {
        $socket = Servers::socket();
        $server = Servers::redis($socket);
        $config = dirname($socket) . '/tidegate.toml';
        file_put_contents($config, "[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['7/h']\n");
        [$service, $address] = Servers::tidegate('127.0.0.1:0', '--config', $config);
        unlink($config);
        [, $onRedis, , $middleware] = self::blocks();
        $onRedis = str_replace(["'127.0.0.1', 6379, 0.1", 'RedisLimiter($redis)'], [var_export($socket, true), 'RedisLimiter($redis, deadline: 30.0)'], $onRedis);
        $tidegate = new \Tidegate\Client("http://$address", deadline: 30.0);
        $app = new class () {
            /** @var list<MiddlewareInterface> */
            public array $added = [];

            public function add(MiddlewareInterface $middleware): void
            {
                $this->added[] = $middleware;
            }
        };
        $names = self::evaluate($onRedis . $middleware, ['app' => $app, 'tidegate' => $tidegate]);
        self::assertSame([true, 9], [$names['decision']->allowed, $names['decision']->remaining]);

        self::assertCount(4, $app->added);
        $limits = [];
        foreach ($app->added as $middleware) {
            $response = $middleware->process(self::request(), self::failing());
            self::assertSame(500, $response->getStatusCode());
            $limits[] = $response->getHeaderLine('X-RateLimit-Limit');
        }
        self::assertSame(['10', '10', '5', '7'], $limits);
        $refunded = $app->added[2]->process(self::request(), self::failing());
        self::assertSame('4', $refunded->getHeaderLine('X-RateLimit-Remaining'), 'the units of the first failure are back');
    }

    /**
     * Runs code with these variables, and returns all its variables.
     *
     * @param array<string, mixed> $variables
     * @return array<string, mixed>
     */
    public static function evaluate(string $code, array $variables): array
    {
        return (static function () use ($code, $variables): array {
            extract($variables);
            eval($code);
            return get_defined_vars();
        })();
    }

    private static function request(): ServerRequestInterface
    {
        $request = new ServerRequest('GET', '/', [], null, '1.1', ['REMOTE_ADDR' => '203.0.113.9']);
        return $request->withAttribute('user', (object) ['id' => '42']);
    }

    private static function failing(): RequestHandlerInterface
    {
        return new class () implements RequestHandlerInterface {
            public function handle(ServerRequestInterface $request): ResponseInterface
            {
                return new Response(500);
            }
        };
    }
}
