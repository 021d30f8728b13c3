<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use PHPUnit\Framework\TestCase;
use Predis\Client as PredisClient;
use Tidegate\Decision;
use Tidegate\Exception\Foreign;
use Tidegate\Exception\Forbidden;
use Tidegate\Exception\Protocol;
use Tidegate\Exception\TidegateException;
use Tidegate\Exception\Unavailable;
use Tidegate\RedisLimiter;

final class RedisLimiterTest extends TestCase
{
    private const GENEROUS = 30.0;

    private static ?Process $server = null;
    private static string $socket = '';

    public static function setUpBeforeClass(): void
    {
        self::$socket = Servers::socket();
        self::$server = Servers::redis(self::$socket);
    }

    public static function tearDownAfterClass(): void
    {
        self::$server = null;
    }

    protected function setUp(): void
    {
        self::phpredis()->flushAll();
    }

    private static function phpredis(?string $socket = null): \Redis
    {
        $redis = new \Redis();
        $redis->connect($socket ?? self::$socket);
        return $redis;
    }

    private static function predis(?string $socket = null, mixed ...$options): PredisClient
    {
        return new PredisClient(['scheme' => 'unix', 'path' => $socket ?? self::$socket] + $options);
    }

    /** @return iterable<string, array{\Closure(?string): (\Redis|PredisClient)}> */
    public static function clients(): iterable
    {
        yield 'phpredis' => [self::phpredis(...)];
        yield 'Predis' => [self::predis(...)];
    }

    private static function limiter(\Redis|PredisClient $redis, mixed ...$options): RedisLimiter
    {
        return new RedisLimiter($redis, ...($options + ['deadline' => self::GENEROUS, 'onError' => 'raise', 'logger' => new MemoryLogger()]));
    }

    /** @dataProvider clients */
    public function testVectorsOfTraces(\Closure $connect): void
    {
        Traces::replay($connect());
        $socket = Servers::socket();
        $valkey = Servers::store('valkey-server', $socket);
        Traces::replay($connect($socket));
    }

    /** @dataProvider clients */
    public function testPeekRefundResetAndBans(\Closure $connect): void
    {
        $redis = $connect();
        $limiter = self::limiter($redis);
        $remaining = static fn () => $limiter->peek("\0 {key}", '10/h')->remaining;
        $admission = $limiter->check("\0 {key}", ['10/h', '100/day'], 4);
        self::assertSame([true, 'store', 6], [$admission->allowed, $admission->source, $remaining()]);
        $limiter->refund($admission);
        $limiter->refund($admission);
        self::assertSame(10, $remaining());
        $denial = $limiter->check("\0 {key}", '10/h', 11);
        self::assertSame([false, null, 429], [$denial->allowed, $denial->retryAfter, $denial->statusCode()]);
        $limiter->check("\0 {key}", '10/h', 7);
        $limiter->refund($denial);
        self::assertSame(3, $remaining());
        $limiter->reset("\0 {key}", '10/h');
        self::assertSame(10, $remaining());

        self::phpredis()->set('tidegate:tg2:{banned}:ban', '1', 60);
        $ban = $limiter->check('banned', '10/h');
        self::assertSame([false, Decision::BANNED, 403], [$ban->allowed, $ban->reason, $ban->statusCode()]);
        self::assertSame(10, $limiter->peek('banned', '10/h')->remaining);
    }

    /** @dataProvider clients */
    public function testScriptIsSentAgainAfterTheServerForgotIt(\Closure $connect): void
    {
        $limiter = self::limiter($connect());
        foreach ([9, 8, 7] as $remaining) {
            self::assertSame($remaining, $limiter->check('a', '10/h')->remaining);
            self::phpredis()->script('flush');
        }
    }

    public function testPrefixAndSerializerOfTheClientAreNotUsed(): void
    {
        $phpredis = self::phpredis();
        $phpredis->setOption(\Redis::OPT_PREFIX, 'app:');
        $phpredis->setOption(\Redis::OPT_SERIALIZER, \Redis::SERIALIZER_PHP);
        self::assertSame(9, self::limiter($phpredis)->check('a', '10/h')->remaining);
        $predis = new PredisClient(['scheme' => 'unix', 'path' => self::$socket], ['prefix' => 'app:', 'exceptions' => false]);
        self::assertSame(8, self::limiter($predis)->check('a', '10/h')->remaining);
        self::assertSame(1, self::phpredis()->exists('tidegate:tg2:{a}:sliding:3600000000'));
        self::assertSame('app:', $phpredis->getOption(\Redis::OPT_PREFIX));
    }

    /** @dataProvider clients */
    public function testReadTimeoutOfTheClientIsRestored(\Closure $connect): void
    {
        $redis = $connect();
        self::limiter($redis, deadline: 5.0)->check('a', '10/h');
        // A blocking command of the application that takes longer than the deadline of the limiter.
        self::limiter($redis, deadline: 0.05, onError: 'allow')->check('a', '10/h');
        self::assertEmpty($redis->blpop(['missing'], 1));
    }

    /** @dataProvider clients */
    public function testWait(\Closure $connect): void
    {
        $limiter = self::limiter($connect());
        foreach (['1/20ms', '100/s leaky-bucket'] as $limit) {
            for ($call = 0; $call < 3; $call++) {
                $decision = $limiter->wait('a', $limit, self::GENEROUS);
                self::assertSame([true, 0.0], [$decision->allowed, $decision->retryAfter]);
            }
        }
        $limiter->check('b', '1/h');
        self::assertFalse($limiter->wait('b', '1/h', 1.0)->allowed);
        self::assertTrue($limiter->wait('c', '1/h leaky-bucket queue=10', 0.001)->allowed);
        self::assertFalse($limiter->wait('c', '1/h leaky-bucket queue=10', 0.001)->allowed);
        self::assertSame(10, $limiter->peek('c', '1/h leaky-bucket queue=10')->remaining, 'the place that came too late was refunded');
    }

    /** @dataProvider clients */
    public function testForeignDataAndMissingPermissionsHaveClasses(\Closure $connect): void
    {
        $admin = self::phpredis();
        $admin->set('tidegate:tg2:{foreign}:sliding:3600000000', 'text');
        $admin->rawCommand('ACL', 'SETUSER', 'limited', 'on', '>secret', '~*', '+ping', '+select');
        $redis = $connect();
        $limited = $redis instanceof \Redis ? self::phpredis() : self::predis(null, username: 'limited', password: 'secret');
        if ($limited instanceof \Redis) {
            $limited->auth(['limited', 'secret']);
        } else {
            $limited->executeRaw(['AUTH', 'limited', 'secret']);
        }
        foreach ([[$redis, 'foreign', Foreign::class], [$limited, 'a', Forbidden::class]] as [$client, $key, $class]) {
            try {
                self::limiter($client)->check($key, '10/h');
                self::fail('no exception');
            } catch (TidegateException $error) {
                self::assertInstanceOf($class, $error);
                self::assertStringNotContainsString('tg2', $error->getMessage());
            }
        }
        self::assertSame('allow', self::limiter($redis, onError: 'allow')->check('foreign', '10/h')->allowed ? 'allow' : 'deny');
    }

    public function testConnectionInATransactionIsAnError(): void
    {
        $redis = self::phpredis();
        $redis->multi();
        $this->expectException(Protocol::class);
        self::limiter($redis)->check('a', '10/h');
    }

    public function testClientThatWasNeverConnectedIsUnavailable(): void
    {
        $this->expectException(Unavailable::class);
        self::limiter(new \Redis())->check('a', '10/h');
    }

    /** @dataProvider clients */
    public function testRedisThatWasKilledOrStoppedIsUsedAgainWhenItIsBack(\Closure $connect): void
    {
        $socket = Servers::socket();
        $server = Servers::redis($socket);
        $redis = $connect($socket);
        $strict = new RedisLimiter($redis, onError: 'raise', logger: new MemoryLogger());
        $open = new RedisLimiter($redis, logger: $logger = new MemoryLogger());
        $closed = new RedisLimiter($redis, onError: 'deny', logger: $whileKilled = new MemoryLogger());
        $answers = static function () use ($strict): bool {
            try {
                $strict->check('a', '1000000/h');
                return true;
            } catch (TidegateException) {
                return false;
            }
        };
        Servers::eventually('an answer', $answers);
        $server->pause();
        Servers::eventually('a failure', static fn () => !$answers());
        $decision = $open->check('a', '1000000/h');
        self::assertSame([true, 'none'], [$decision->allowed, $decision->source]);
        self::assertInstanceOf(Unavailable::class, $decision->error);
        self::assertStringContainsString('did not answer within 25 ms', $logger->messages[0]);
        $server->resume();
        Servers::eventually('an answer after SIGCONT', $answers);
        // A late reply must not be taken for the reply to another command.
        self::assertSame('echo', $redis->echo('echo'));
        self::assertEmpty($redis->blpop(['missing'], 1), 'a command that takes longer than the deadline of the limiter');
        $server->kill();
        $decision = $closed->check('a', '1000000/h');
        self::assertSame([false, 503], [$decision->allowed, $decision->statusCode()]);
        self::assertNotSame([], $whileKilled->messages);
        $restarted = Servers::redis($socket);
        Servers::eventually('an answer of the new process', $answers);
    }

    /** @dataProvider clients */
    public function testCallsLeakNothing(\Closure $connect): void
    {
        $limiter = self::limiter($connect());
        $calls = getenv('TIDEGATE_LONG') ? 100_000 : 500;
        for ($call = 0; $call < 100; $call++) {
            $limiter->check('a', '10/h');
        }
        $before = memory_get_usage();
        for ($call = 0; $call < $calls; $call++) {
            $limiter->check('a', '10/h');
        }
        self::assertLessThan($before + 100_000, memory_get_usage());
        self::assertLessThan(10, count((array) self::phpredis()->client('list')), 'connections');
    }

    public function testParallelProcessesAdmitExactlyTheQuota(): void
    {
        $children = [];
        for ($child = 0; $child < 8; $child++) {
            $children[] = new Process([PHP_BINARY, __DIR__ . '/parallel_checks.php', self::$socket, '25', $child % 2 === 0 ? 'phpredis' : 'predis']);
        }
        $admitted = array_sum(array_map(static fn (Process $child) => (int) $child->awaitOutput('/^(\d+)$/'), $children));
        self::assertSame(50, $admitted, 'of 200 calls with a quota of 50');
    }
}
