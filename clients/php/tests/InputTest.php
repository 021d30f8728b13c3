<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use PHPUnit\Framework\TestCase;
use Tidegate\Client;
use Tidegate\Decision;
use Tidegate\Demand;
use Tidegate\Exception\Foreign;
use Tidegate\Exception\Forbidden;
use Tidegate\Exception\Invalid;
use Tidegate\Exception\Protocol;
use Tidegate\Exception\Unavailable;
use Tidegate\FailurePolicy;
use Tidegate\Limit;
use Tidegate\RedisLimiter;
use Tidegate\ScriptCall;
use Tidegate\TrustedProxies;

final class InputTest extends TestCase
{
    /** @return iterable<string, array{\Closure}> */
    public static function invalidCalls(): iterable
    {
        $client = static fn (string $url = 'http://127.0.0.1:1', mixed ...$options) => new Client($url, ...$options);
        yield 'no limit' => [static fn () => $client()->check('a', [])];
        yield '33 limits' => [static fn () => $client()->checkAll(array_fill(0, 33, new Demand('a', '1/s')))];
        yield 'negative cost' => [static fn () => $client()->check('a', '1/s', -1)];
        yield 'absurd cost' => [static fn () => $client()->check('a', '1/s', PHP_INT_MAX)];
        yield 'long key' => [static fn () => $client()->check(str_repeat('k', 65_537), '1/s')];
        yield 'key that is not UTF-8' => [static fn () => $client()->check("\xff", '1/s')];
        yield 'long wait' => [static fn () => $client()->wait('a', '1/s', 61)];
        yield 'wait that is not a number' => [static fn () => $client()->wait('a', '1/s', NAN)];
        foreach (['', '127.0.0.1:8080', 'ftp://127.0.0.1', 'http://', 'http://a b', 'http://a/?q', 'http://u@a', "http://a\r\nb", 'http:///x'] as $url) {
            yield "URL '$url'" => [static fn () => $client($url)];
        }
        yield 'deadline' => [static fn () => $client(deadline: 0.0)];
        yield 'on_error' => [static fn () => $client(onError: 'ignore')];
        yield 'token' => [static fn () => $client(token: "a\r\nb")];
        yield 'prefix' => [static fn () => new RedisLimiter(new \Redis(), prefix: '{a}')];
        yield 'bad limit' => [static fn () => (new RedisLimiter(new \Redis()))->check('a', 'ten')];
        yield 'same counter twice' => [static fn () => (new RedisLimiter(new \Redis()))->check('a', ['1/s', '2/s'])];
        yield 'reset without limits' => [static fn () => (new RedisLimiter(new \Redis()))->reset('a', [])];
        yield 'network with host bits' => [static fn () => new TrustedProxies(['10.0.0.1/8'])];
        yield 'network that is a name' => [static fn () => new TrustedProxies(['proxy.example'])];
        yield 'prefix length' => [static fn () => new TrustedProxies(['10.0.0.0/33'])];
        yield 'header' => [static fn () => new TrustedProxies([], 'a b')];
        yield 'peer' => [static fn () => (new TrustedProxies())->clientAddress('unknown', [])];
    }

    /** @dataProvider invalidCalls */
    public function testBadInputIsInvalidBeforeAnyCall(\Closure $call): void
    {
        $this->expectException(Invalid::class);
        $call();
    }

    public function testErrorOfALimitSaysWhatIsExpected(): void
    {
        $cases = [
            '10/fortnight' => 'us, ms, s, min, h, day, week', '0/min' => '1 to 10000000', '10' => 'expected a /', '10/5' => 'expected a window',
            '10/401day' => '1ms to 400day', '10/min slidding' => 'sliding, sliding-log', '10/min sliding burst=5' => 'burst is not an option of sliding',
            '10/min token-bucket burst=0' => 'burst=N', '10/min count_denied=yes' => 'count_denied=true', str_repeat('9', 10_000) => 'at most 256 bytes',
        ];
        foreach ($cases as $text => $phrase) {
            try {
                Limit::parse((string) $text);
                self::fail("$text is accepted");
            } catch (Invalid $error) {
                self::assertStringContainsString($phrase, $error->getMessage());
                self::assertLessThan(200, strlen($error->getMessage()));
            }
        }
    }

    public function testErrorRepliesHaveClassesAndNoKeys(): void
    {
        foreach (
            [
                "NOPERM No permissions to access a key 'secret'" => Forbidden::class,
                "ERR ACL failure in script: No permissions to access the 'secret' key" => Forbidden::class,
                'WRONGPASS invalid username-password pair' => Forbidden::class,
                "OOM command not allowed when used memory > 'maxmemory'." => Unavailable::class,
                'ERR max number of clients reached' => Unavailable::class,
                'TIDEGATE_FOREIGN the key holds another type' => Foreign::class,
                'TIDEGATE_PARTLY TIDEGATE_FOREIGN the list is not a log' => Foreign::class,
                'TIDEGATE_INTERNAL user_script:12: secret' => Protocol::class,
                "CROSSSLOT Keys in request don't hash to the same slot" => Invalid::class,
                'secret' => Protocol::class,
                '' => Protocol::class,
            ] as $reply => $class
        ) {
            $error = ScriptCall::error($reply);
            self::assertInstanceOf($class, $error);
            self::assertStringNotContainsString('secret', $error->getMessage());
        }
    }

    public function testMalformedRepliesOfTheScriptAreProtocolErrors(): void
    {
        $call = ScriptCall::check('tidegate', [new Demand('a', '10/min')]);
        foreach ([null, false, 'text', [], [1], [1, 1], [1, '1', 1, 1, 0, 0, 0, 0], [1, 2, 1, 1, 0, 0, 0, 0], [1, 1, 7, 1, 0, 0, 0, 0], [1, 1, 1, -9, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, -1]] as $reply) {
            try {
                $call->decode($reply);
                self::fail(json_encode($reply) . ' is accepted');
            } catch (Protocol) {
                $this->addToAssertionCount(1);
            }
        }
    }

    public function testBanIsARefusalWith403(): void
    {
        $call = ScriptCall::check('tidegate', [new Demand('a', '10/min')]);
        $ban = $call->decode([1760000000000000, 0, 1500000]);
        self::assertSame([false, Decision::BANNED, 403, 1.5], [$ban->allowed, $ban->reason, $ban->statusCode(), $ban->retryAfter]);
        self::assertSame('{"error":"banned","message":"this caller is banned","retry_after":2,"retry_after_ms":1500}', $ban->body());
        self::assertSame(['cache-control' => 'no-store', 'content-type' => 'application/json', 'retry-after' => '2'], $ban->headers());
        $forever = $call->decode([1760000000000000, 0, -1]);
        self::assertNull($forever->retryAfter);
        self::assertArrayNotHasKey('retry-after', $forever->headers());
    }

    public function testFailuresAreLoggedAtMostOnceASecond(): void
    {
        $logger = new MemoryLogger();
        $policy = new FailurePolicy(FailurePolicy::DENY, $logger);
        for ($call = 0; $call < 1000; $call++) {
            $decision = $policy->apply(new Unavailable('no answer'));
            self::assertSame([false, 503, '1'], [$decision->allowed, $decision->statusCode(), $decision->headers()['retry-after']]);
        }
        // The loop takes far less than a second, so that a second line is possible but no third.
        self::assertLessThanOrEqual(2, count($logger->messages));
        self::assertSame('warning: tidegate: no verdict; requests are refused: no answer', $logger->messages[0]);
    }
}
