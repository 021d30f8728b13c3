<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use PHPUnit\Framework\TestCase;
use Tidegate\Client;
use Tidegate\Decision;
use Tidegate\Exception\Forbidden;
use Tidegate\Exception\Invalid;
use Tidegate\Exception\Protocol;
use Tidegate\Exception\TidegateException;
use Tidegate\Exception\Unavailable;
use Tidegate\Refund;

final class ClientTest extends TestCase
{
    private const GENEROUS = 30.0;
    private const ADMISSION = '{"allowed":true,"source":"store","limits":[{"name":"per-minute","quota":10,"window_ms":60000,"remaining":9,'
        . '"retry_after_ms":0,"next_after_ms":60000,"reset_after_ms":60000,"allowed":true}],"receipt":"R1"}';

    private string $log = '';

    protected function setUp(): void
    {
        $this->log = (string) tempnam(sys_get_temp_dir(), 'tidegate');
    }

    protected function tearDown(): void
    {
        unlink($this->log);
    }

    /** @return list<string> */
    private function logged(): array
    {
        return file($this->log, FILE_IGNORE_NEW_LINES) ?: [];
    }

    public function testSendsChecksAndReadsDecisions(): void
    {
        foreach (['plain', 'chunked', 'once'] as $mode) {
            file_put_contents($this->log, '');
            [$service, $url] = Servers::fake($mode, 200, self::ADMISSION, $this->log);
            $client = new Client("$url/", self::GENEROUS, token: 'T');
            $decision = $client->check("user:\0 {42}", ['10/min', '1000/day'], 3);
            self::assertSame([true, 'store', 10, 9, 0.0, 60.0], [$decision->allowed, $decision->source, $decision->limit, $decision->remaining, $decision->retryAfter, $decision->resetAfter]);
            self::assertSame(['x-ratelimit-limit' => '10'], $decision->headers());
            $client->check('a', '10/min', refundable: true);
            $client->wait('a', '10/min', 0.0015);
            $expected = [
                '/v1/check {"checks":[{"key":"user:\u0000 {42}","limit":"10/min","cost":3},{"key":"user:\u0000 {42}","limit":"1000/day","cost":3}]} with token',
                '/v1/check {"checks":[{"key":"a","limit":"10/min","cost":1}],"receipt":true} with token',
                '/v1/check {"checks":[{"key":"a","limit":"10/min","cost":1}],"wait_ms":2} with token',
            ];
            self::assertSame($expected, array_values(array_diff($this->logged(), ['connection'])));
            $service->kill();
        }
    }

    public function testConnectionIsReusedAndNothingLeaks(): void
    {
        [$service, $url] = Servers::fake('plain', 200, self::ADMISSION, $this->log);
        $client = new Client($url, self::GENEROUS, onError: 'raise');
        $calls = getenv('TIDEGATE_LONG') ? 100_000 : 500;
        for ($call = 0; $call < 100; $call++) {
            $client->check('a', '10/min');
        }
        $before = memory_get_usage();
        for ($call = 0; $call < $calls; $call++) {
            self::assertTrue($client->check('a', '10/min')->allowed);
        }
        self::assertLessThan($before + 100_000, memory_get_usage());
        self::assertCount(1, array_keys($this->logged(), 'connection', true));
        $service->kill();
    }

    public function testRefundIsSentOncePerDecision(): void
    {
        [$service, $url] = Servers::fake('plain', 200, self::ADMISSION, $this->log);
        $client = new Client($url, self::GENEROUS);
        $decision = $client->check('a', '10/min', refundable: true);
        $client->refund($decision);
        $client->refund($decision);
        $client->refund(new Decision(true, 'none'));
        self::assertSame(['/v1/refund {"receipt":"R1"}'], array_values(preg_grep('#^/v1/refund#', $this->logged())));
        $this->expectException(Invalid::class);
        $client->refund(new Decision(true, 'store', limits: $decision->limits));
    }

    /** @return iterable<array{int, string, class-string}> */
    public static function answersThatAreNoDecisions(): iterable
    {
        yield [200, '', Protocol::class];
        yield [200, '<html>', Protocol::class];
        yield [200, '{}', Protocol::class];
        yield [200, '{"allowed":false}', Protocol::class];
        yield [200, '{"allowed":true,"limits":[7]}', Protocol::class];
        yield [200, str_repeat('x', 120_000), Protocol::class];
        yield [302, '', Protocol::class];
        yield [400, '{"error":"bad_request","message":"limit: unknown unit"}', Invalid::class];
        yield [401, '{"error":"unauthenticated","message":"token"}', Forbidden::class];
        yield [403, '', Forbidden::class];
        yield [404, '', Protocol::class];
        yield [413, '', Invalid::class];
        yield [429, '', Unavailable::class];
        yield [500, '<html>', Unavailable::class];
    }

    /** @dataProvider answersThatAreNoDecisions */
    public function testAnswersThatAreNoDecisionsHaveClasses(int $status, string $body, string $class): void
    {
        [$service, $url] = Servers::fake('plain', $status, $body);
        $this->expectException($class);
        (new Client($url, self::GENEROUS, onError: 'raise', logger: new MemoryLogger()))->check('a', '10/min');
    }

    public function testServersThatSpeakNoHttpAreErrors(): void
    {
        foreach (["+OK\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n", str_repeat('x', 70_000)] as $bytes) {
            [$service, $url] = Servers::fake('raw', 200, $bytes);
            try {
                (new Client($url, self::GENEROUS, onError: 'raise', logger: new MemoryLogger()))->check('a', '10/min');
                self::fail('no exception');
            } catch (Protocol $error) {
                self::assertStringContainsString($url, $error->getMessage());
            }
            $service->kill();
        }
    }

    public function testRefusalsOfTheServiceAreDecisions(): void
    {
        $cases = [
            [429, '{"allowed":false,"source":"deny_cache","limits":[{"name":"per-minute","quota":10,"window_ms":60000,"remaining":0,"retry_after_ms":1500,"next_after_ms":1500,"reset_after_ms":60000,"allowed":false}],'
                . '"error":"rate_limited","message":"slow down","limit":10,"retry_after":2,"retry_after_ms":1500,"policy":"per-minute","plan":"free"}', 'rate_limited', 1.5],
            [429, '{"allowed":false,"source":"store","limits":[],"error":"rate_limited","message":"m","retry_after":null,"retry_after_ms":null}', 'rate_limited', null],
            [403, '{"allowed":false,"source":"store","limits":[],"error":"banned","message":"m","retry_after":null,"retry_after_ms":null}', 'banned', null],
            [503, '{"allowed":false,"source":"none","limits":[],"error":"unavailable","message":"m","retry_after":1,"retry_after_ms":1000}', 'unavailable', 1.0],
        ];
        foreach ($cases as [$status, $body, $reason, $retryAfter]) {
            [$service, $url] = Servers::fake('plain', $status, $body);
            $decision = (new Client($url, self::GENEROUS))->check('a', '10/min');
            self::assertSame([false, $reason, $retryAfter, $status], [$decision->allowed, $decision->reason, $decision->retryAfter, $decision->statusCode()]);
            $fields = json_decode($body, true);
            unset($fields['allowed'], $fields['source'], $fields['limits']);
            self::assertEquals($fields, json_decode($decision->body(), true));
            $service->kill();
        }
    }

    public function testSilentServiceIsDecidedByOnErrorAtTheDeadline(): void
    {
        [$service, $url] = Servers::fake('silent');
        foreach (['allow' => [true, 200], 'deny' => [false, 503]] as $onError => [$allowed, $status]) {
            $logger = new MemoryLogger();
            $decision = (new Client($url, onError: $onError, logger: $logger))->check('a', '10/min');
            self::assertSame([$allowed, $status, 'none'], [$decision->allowed, $decision->statusCode(), $decision->source]);
            self::assertInstanceOf(Unavailable::class, $decision->error);
            self::assertStringContainsString('did not answer within 50 ms', $logger->messages[0]);
            self::assertSame([], $allowed ? $decision->headers() : []);
        }
        $this->expectException(Unavailable::class);
        (new Client($url, onError: 'raise', logger: new MemoryLogger()))->check('a', '10/min');
    }

    /** Each byte comes soon after the one before, so that a timeout per read never expires. */
    public function testSlowServiceIsDecidedAtTheDeadlineAndUsedAgainWhenItIsFast(): void
    {
        [$service, $url] = Servers::fake('drip', 200, self::ADMISSION);
        $client = new Client($url, logger: $logger = new MemoryLogger());
        $decision = $client->check('a', '10/min');
        self::assertSame([true, 'none'], [$decision->allowed, $decision->source]);
        self::assertInstanceOf(Unavailable::class, $decision->error);
        self::assertStringContainsString('did not answer within 50 ms', $logger->messages[0]);
        Servers::eventually('a decision of the service', static fn () => $client->check('a', '10/min')->source === 'store');
    }

    public function testUnreachableServiceIsUnavailable(): void
    {
        // Packets to 192.0.2.1 are dropped or rejected (RFC 5737). Nothing listens on port 1.
        foreach (['http://127.0.0.1:1', 'http://192.0.2.1:9', 'http://does-not-exist.invalid'] as $url) {
            $decision = (new Client($url, logger: $logger = new MemoryLogger()))->check('a', '10/min');
            self::assertInstanceOf(Unavailable::class, $decision->error, $url);
            self::assertCount(1, $logger->messages, $url);
        }
    }

    public function testServiceThatWasKilledOrStoppedIsUsedAgainWhenItIsBack(): void
    {
        [$service, $address] = Servers::tidegate();
        $strict = new Client("http://$address", onError: 'raise', logger: new MemoryLogger());
        $open = new Client("http://$address", logger: $logger = new MemoryLogger());
        $answers = static function () use ($strict): bool {
            try {
                $strict->peek('a', '10/min');
                return true;
            } catch (TidegateException) {
                return false;
            }
        };
        Servers::eventually('an answer', $answers);
        $service->pause();
        Servers::eventually('a failure', static fn () => !$answers());
        $decision = $open->check('a', '10/min');
        self::assertTrue($decision->allowed);
        self::assertStringContainsString('did not answer within 50 ms', (string) $decision->error?->getMessage());
        $service->resume();
        Servers::eventually('an answer after SIGCONT', $answers);
        $service->kill();
        self::assertStringContainsString('did not answer within 50 ms', $logger->messages[0]);
        // Another client, because a failure is logged at most once a second.
        $decision = (new Client("http://$address", logger: $logger = new MemoryLogger()))->check('a', '10/min');
        self::assertSame([true, 'none'], [$decision->allowed, $decision->source]);
        self::assertInstanceOf(Unavailable::class, $decision->error);
        self::assertNotSame([], $logger->messages);
        [$restarted] = Servers::tidegate($address);
        Servers::eventually('an answer of the new process', $answers);
    }

    public function testServiceCountsAndDenies(): void
    {
        [$service, $address] = Servers::tidegate();
        $client = new Client("http://$address", self::GENEROUS, onError: 'raise');
        $key = "user:\0 {42}";
        $admitted = 0;
        for ($call = 0; $call < 20; $call++) {
            $admitted += (int) $client->check($key, ['5/h', '1000/day'])->allowed;
        }
        self::assertSame(5, $admitted);
        $denial = $client->check($key, ['5/h', '1000/day']);
        self::assertSame([false, 429, 5, 2], [$denial->allowed, $denial->statusCode(), $denial->limit, count($denial->limits)]);
        self::assertGreaterThan(0.0, $denial->retryAfter);
        self::assertNull($client->check('b', '5/h', 6)->retryAfter);
        self::assertSame(5, $client->peek('b', '5/h')->remaining);
        $this->expectException(Invalid::class);
        $this->expectExceptionMessage('week');
        $client->check('b', '5/fortnight');
    }

    public function testServiceOverTlsWithAToken(): void
    {
        $key = openssl_pkey_new(['private_key_bits' => 2048]);
        $request = openssl_csr_new(['commonName' => '127.0.0.1'], $key);
        self::assertNotFalse($key && $request);
        openssl_x509_export(openssl_csr_sign($request, null, $key, 1), $certificate);
        openssl_pkey_export($key, $privateKey);
        $files = ["$this->log.cert" => $certificate, "$this->log.key" => $privateKey, "$this->log.token" => 'a-token-of-the-service'];
        array_map('file_put_contents', array_keys($files), $files);
        [$service, $address] = Servers::tidegate('127.0.0.1:0', '--tls-cert', "$this->log.cert", '--tls-key', "$this->log.key", '--http-token-file', "$this->log.token");
        $client = fn (string $token, array $tls) => new Client("https://$address", self::GENEROUS, 'raise', $token, new MemoryLogger(), $tls);
        $trusting = ['cafile' => "$this->log.cert", 'peer_name' => '127.0.0.1'];
        $trusted = $client('a-token-of-the-service', $trusting);
        foreach ([9, 8, 7] as $remaining) {
            self::assertSame($remaining, $trusted->check('a', '10/h')->remaining);
        }
        foreach ([[Forbidden::class, $client('wrong', $trusting)], [Unavailable::class, $client('a-token-of-the-service', [])]] as [$class, $rejected]) {
            try {
                $rejected->check('a', '10/h');
                self::fail('no exception');
            } catch (TidegateException $error) {
                self::assertInstanceOf($class, $error);
                self::assertStringNotContainsString('a-token', $error->getMessage());
            }
        }
        array_map('unlink', array_keys($files));
    }

    public function testServiceRefundsAndWaits(): void
    {
        [$service, $address] = Servers::tidegate();
        $client = new Client("http://$address", self::GENEROUS, onError: 'raise');
        $decision = $client->check('a', '5/h', 3, refundable: true);
        self::assertSame(2, $decision->remaining);
        $client->refund($decision);
        $client->refund($decision);
        self::assertSame(5, $client->peek('a', '5/h')->remaining);
        for ($call = 0; $call < 3; $call++) {
            self::assertTrue($client->wait('b', '1/20ms', self::GENEROUS)->allowed);
        }
        $client->check('c', '1/h');
        $denial = $client->wait('c', '1/h', 1.0);
        self::assertFalse($denial->allowed);
        self::assertGreaterThan(60.0, $denial->retryAfter);
        $this->expectException(Invalid::class);
        $client->refund(new Decision(true, 'store', refund: new Refund('forged')));
    }

    public function testRulesOfTheServiceDecideAndRefund(): void
    {
        $config = $this->log . '.toml';
        $rule = "[[rules]]\nname = \"login\"\nmatch = { path = \"/login\" }\nby = [\"ip\"]\nlimits = [\"2/h\"]\ncharge = \"on_failure\"\n";
        file_put_contents($config, $rule);
        [$service, $address] = Servers::tidegate('127.0.0.1:0', '--config', $config);
        unlink($config);
        $client = new Client("http://$address", self::GENEROUS, onError: 'raise');
        $login = static fn () => $client->checkRequest('POST', '/login', ['Host' => 'example.com'], '203.0.113.9');
        foreach ([200, 200, 200, 401, 401] as $status) {
            $decision = $login();
            self::assertSame([true, '2'], [$decision->allowed, $decision->headers()['x-ratelimit-limit']]);
            self::assertSame($status === 200, $decision->refundsOn($status));
            $client->refundByStatus($decision, $status);
        }
        $refusal = $login();
        self::assertSame([false, 429], [$refusal->allowed, $refusal->statusCode()]);
        self::assertArrayHasKey('retry-after', $refusal->headers());
        self::assertSame('rate_limited', json_decode($refusal->body(), true)['error']);
    }

    public function testConnectionIsNotSharedWithAForkedProcess(): void
    {
        [$service, $url] = Servers::fake('plain', 200, self::ADMISSION, $this->log);
        $client = new Client($url, self::GENEROUS, onError: 'raise');
        $client->check('a', '10/min');
        $child = pcntl_fork();
        if ($child === 0) {
            $client->check('a', '10/min');
            posix_kill((int) getmypid(), SIGKILL); // without the end of the test run
        }
        pcntl_waitpid($child, $status);
        $client->check('a', '10/min');
        self::assertCount(2, array_keys($this->logged(), 'connection', true));
    }
}
