<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use PHPUnit\Framework\TestCase;
use Predis\Client as PredisClient;
use Tidegate\Decision;
use Tidegate\Demand;
use Tidegate\Exception\Invalid;
use Tidegate\Exception\TidegateException;
use Tidegate\Exception\Unavailable;
use Tidegate\RedisLimiter;

/** The limiter on a Redis Cluster of three masters. */
final class ClusterTest extends TestCase
{
    /** Enough subjects that each master has some of them. */
    private const SUBJECTS = 40;

    private static ?Process $redis = null;
    private static ?Process $valkey = null;
    /** @var list<string> */
    private static array $masters = [];
    /** @var list<string> */
    private static array $valkeyMasters = [];

    public static function setUpBeforeClass(): void
    {
        [self::$redis, self::$valkey] = [Servers::startCluster('redis'), Servers::startCluster('valkey')];
        [self::$masters, self::$valkeyMasters] = [Servers::addresses(self::$redis), Servers::addresses(self::$valkey)];
    }

    public static function tearDownAfterClass(): void
    {
        self::$redis = self::$valkey = null;
    }

    /** @param ?list<string> $masters */
    private static function phpredis(?array $masters = null): \RedisCluster
    {
        return new \RedisCluster(null, $masters ?? self::$masters, 5.0, 30.0);
    }

    /** @param ?list<string> $masters */
    private static function predis(?array $masters = null): PredisClient
    {
        return new PredisClient(array_map(static fn (string $master) => "tcp://$master", $masters ?? self::$masters), ['cluster' => 'redis']);
    }

    /** @return iterable<string, array{\Closure(?list<string>): (\RedisCluster|PredisClient)}> */
    public static function clients(): iterable
    {
        yield 'phpredis' => [self::phpredis(...)];
        yield 'Predis' => [self::predis(...)];
    }

    private static function limiter(\RedisCluster|\Redis|PredisClient $redis, mixed ...$options): RedisLimiter
    {
        return new RedisLimiter($redis, ...($options + ['deadline' => 30.0, 'onError' => 'raise', 'logger' => new MemoryLogger()]));
    }

    /**
     * Returns a client of each master.
     *
     * @param list<string> $addresses
     * @return list<\Redis>
     */
    private static function nodes(array $addresses): array
    {
        return array_map(static function (string $address): \Redis {
            $node = new \Redis();
            $node->connect('127.0.0.1', (int) explode(':', $address)[1]);
            return $node;
        }, $addresses);
    }

    private static function changeSlot(string $command, string $subject): void
    {
        self::$redis->write("$command {{$subject}}");
        self::$redis->awaitOutput('/^(ok)$/');
    }

    /** @dataProvider clients */
    public function testVectorsOfTraces(\Closure $connect): void
    {
        $redis = $connect();
        $prefix = 'traces-' . strtolower((new \ReflectionClass($redis))->getShortName());
        Traces::replay($redis, $prefix, isCluster: true);
        foreach (self::nodes(self::$masters) as $node) {
            self::assertNotSame([], $node->keys("$prefix:*"), 'each master has counters');
        }
    }

    public function testVectorsOfTracesOnValkey(): void
    {
        Traces::replay(self::phpredis(self::$valkeyMasters), isCluster: true);
        foreach (self::nodes(self::$valkeyMasters) as $node) {
            self::assertNotSame([], $node->keys('traces:*'), 'each master has counters');
        }
    }

    /** @dataProvider clients */
    public function testAllMethodsWorkForTheKeysOfAllMasters(\Closure $connect): void
    {
        $redis = $connect();
        $prefix = 'methods-' . strtolower((new \ReflectionClass($redis))->getShortName());
        $limiter = self::limiter($redis, prefix: $prefix);
        for ($n = 0; $n < self::SUBJECTS; $n++) {
            $key = "\0 {c}$n";
            $remaining = static fn () => $limiter->peek($key, ['2/h', '9/day'])->remaining;
            $admission = $limiter->check($key, ['2/h', '9/day'], 2);
            self::assertSame([true, 0], [$admission->allowed, $remaining()]);
            $limiter->refund($admission);
            self::assertSame(2, $remaining());
            $limiter->check($key, ['2/h', '9/day']);
            self::assertSame(1, $remaining());
            $limiter->reset($key, ['2/h', '9/day']);
            self::assertSame(2, $remaining());
        }
        self::phpredis()->set("$prefix:tg2:{banned}:ban", '1');
        self::assertSame(Decision::BANNED, $limiter->check('banned', '2/h')->reason);
    }

    /** @dataProvider clients */
    public function testCheckOfSeveralKeysIsInvalidAndChargesNothing(\Closure $connect): void
    {
        $demands = array_map(static fn (int $n) => new Demand("several$n", '9/h'), range(1, 10));
        foreach (['allow', 'raise'] as $onError) {
            try {
                self::limiter($connect(), onError: $onError)->checkAll($demands);
                self::fail('no exception');
            } catch (Invalid $error) {
                self::assertSame('the keys of one check are in different slots of the Redis Cluster; use one key per check', $error->getMessage());
            }
        }
        foreach ($demands as $demand) {
            self::assertSame(9, self::limiter($connect())->peek($demand->key, '9/h')->remaining);
        }
    }

    /** @dataProvider clients */
    public function testScriptIsSentOnceToEachMaster(\Closure $connect): void
    {
        $redis = $connect();
        $limiter = self::limiter($redis, prefix: 'sent-' . strtolower((new \ReflectionClass($redis))->getShortName()));
        foreach (self::nodes(self::$masters) as $node) {
            $node->script('flush');
            $node->rawCommand('CONFIG', 'RESETSTAT');
        }
        foreach ([8, 7] as $remaining) {
            for ($n = 0; $n < self::SUBJECTS; $n++) {
                self::assertSame($remaining, $limiter->check("s$n", '9/h')->remaining);
            }
        }
        foreach (self::nodes(self::$masters) as $node) {
            self::assertStringContainsString('cmdstat_eval:calls=1,', (string) $node->rawCommand('INFO', 'commandstats'));
        }
    }

    /** @dataProvider clients */
    public function testCountersFollowASlotThatMoves(\Closure $connect): void
    {
        $redis = $connect();
        $subject = 'moving-' . strtolower((new \ReflectionClass($redis))->getShortName());
        $limiter = self::limiter($redis);
        self::assertSame(8, $limiter->check($subject, '9/h')->remaining);
        self::changeSlot('begin-move', $subject);
        // The node has the counter, but not the key of the ban: it rejects the call with TRYAGAIN.
        self::assertUnavailable('TRYAGAIN', static fn () => $limiter->check($subject, '9/h'));
        $passed = self::limiter($redis, onError: 'allow')->check($subject, '9/h');
        self::assertSame([true, 'none'], [$passed->allowed, $passed->source]);
        self::assertSame(9, $limiter->peek($subject, '9/day')->remaining, 'a key that no node has yet is on the other master');
        self::changeSlot('end-move', $subject);
        self::assertSame(7, $limiter->check($subject, '9/h')->remaining, 'calls without a verdict charge nothing');
        $limiter->reset($subject, '9/h');
        self::assertSame(8, $limiter->check($subject, '9/h')->remaining);
    }

    /** @dataProvider clients */
    public function testSlotWithoutAMasterIsUnavailable(\Closure $connect): void
    {
        $redis = $connect();
        $subject = 'dropped-' . strtolower((new \ReflectionClass($redis))->getShortName());
        $limiter = self::limiter($redis);
        self::assertSame(8, $limiter->check($subject, '9/h')->remaining);
        self::changeSlot('drop-slot', $subject);
        self::assertUnavailable('CLUSTERDOWN', static fn () => $limiter->check($subject, '9/h'));
        $denied = self::limiter($redis, onError: 'deny')->check($subject, '9/h');
        self::assertSame([false, 503], [$denied->allowed, $denied->statusCode()]);
        self::changeSlot('restore-slot', $subject);
        self::assertSame(7, $limiter->check($subject, '9/h')->remaining);
    }

    public function testCallWithALostReplyIsNotRepeatedByPredis(): void
    {
        $addresses = array_map(static fn (string $master) => "tcp://$master", self::$masters);
        $redis = new PredisClient($addresses, ['cluster' => 'redis', 'connections' => ['tcp' => LossyConnection::class]]);
        $limiter = self::limiter($redis);
        self::assertSame(8, $limiter->check('lost', '9/h')->remaining);
        LossyConnection::$isArmed = true;
        self::assertUnavailable('lost by the test', static fn () => $limiter->check('lost', '9/h'));
        self::assertFalse(LossyConnection::$isArmed);
        self::assertSame(7, $limiter->peek('lost', '9/h')->remaining, 'charged once');
    }

    /** Without the option cluster, Predis distributes keys among servers itself. A server that fails must keep its keys. */
    public function testServerOfAClientThatDistributesKeysIsKeptAfterAFailure(): void
    {
        $client = new PredisClient(['unix:/nonexistent/a.sock', 'unix:/nonexistent/b.sock']);
        self::assertUnavailable('Redis did not answer', static fn () => self::limiter($client)->check('alice', '5/min'));
        self::assertCount(2, $client->getConnection());
    }

    public function testPrefixOfTheClientIsNotUsed(): void
    {
        $phpredis = self::phpredis();
        $phpredis->setOption(\RedisCluster::OPT_PREFIX, 'app:');
        $phpredis->setOption(\RedisCluster::OPT_SERIALIZER, \RedisCluster::SERIALIZER_PHP);
        $limiter = self::limiter($phpredis);
        self::assertSame(8, $limiter->check('prefixed', '9/h')->remaining);
        self::assertSame(1, self::phpredis()->exists('tidegate:tg2:{prefixed}:sliding:3600000000'));
        $limiter->reset('prefixed', '9/h');
        self::assertSame(9, $limiter->peek('prefixed', '9/h')->remaining);
        self::assertSame('app:', $phpredis->getOption(\RedisCluster::OPT_PREFIX));
    }

    public function testBlockOfTheReadmeWorks(): void
    {
        $block = str_replace(['127.0.0.1:6379', '0.1, 0.1'], [self::$masters[0], '5.0, 30.0'], ReadmeTest::blocks()[2]);
        $decision = ReadmeTest::evaluate($block, [])['decision'];
        self::assertSame(['store', 9], [$decision->source, $decision->remaining]);
    }

    public function testErrorOfAClientOfOneNodeSaysToUseAClusterClient(): void
    {
        $errors = [];
        foreach (self::nodes(self::$masters) as $node) {
            try {
                self::limiter($node)->check('k', '9/h');
            } catch (Unavailable $error) {
                $errors[] = $error->getMessage();
            }
        }
        self::assertCount(2, $errors, 'one of three masters has the key');
        self::assertStringContainsString('use a cluster client', $errors[0]);
        self::assertStringNotContainsString('tg2', $errors[0]);
    }

    private static function assertUnavailable(string $phrase, \Closure $call): void
    {
        try {
            $call();
            self::fail('no exception');
        } catch (TidegateException $error) {
            self::assertInstanceOf(Unavailable::class, $error);
            self::assertStringContainsString($phrase, $error->getMessage());
        }
    }
}
