<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use Nyholm\Psr7\Response as Psr7Response;
use Nyholm\Psr7\ServerRequest;
use Nyholm\Psr7\Stream;
use Nyholm\Psr7\UploadedFile;
use PHPUnit\Framework\TestCase;
use Psr\Http\Message\ResponseInterface;
use Psr\Http\Message\ServerRequestInterface;
use Psr\Http\Message\UploadedFileInterface;
use Psr\Http\Server\RequestHandlerInterface;
use Tidegate\Client;
use Tidegate\Decision;
use Tidegate\Exception\Invalid;
use Tidegate\Psr15\RateLimit;
use Tidegate\ScriptCall;

final class RateLimitTest extends TestCase
{
    private const ADMITTED = [1760000000000000, 1, 1, 9, 0, 60000000, 60000000, 0];
    private const DENIED = [1760000000000000, 1, 0, 0, 12000000, 12000000, 60000000, 0];
    private const BANNED = [1760000000000000, 0, 5000000];

    /** @param array<string, string|list<string>> $headers */
    private static function request(string $peer = '203.0.113.9', array $headers = []): ServerRequestInterface
    {
        return new ServerRequest('GET', 'http://example.com/a%20b?q=1', $headers, null, '1.1', ['REMOTE_ADDR' => $peer]);
    }

    private static function handler(int $status = 200): RequestHandlerInterface
    {
        return new class ($status) implements RequestHandlerInterface {
            public function __construct(private readonly int $status)
            {
            }

            public function handle(ServerRequestInterface $request): ResponseInterface
            {
                if ($this->status === 0) {
                    throw new \LogicException('a bug');
                }
                $decision = $request->getAttribute(RateLimit::ATTRIBUTE);
                return new Psr7Response($this->status, [], $decision instanceof Decision && $decision->allowed ? 'hello' : 'no decision');
            }
        };
    }

    public function testAnswersWithHeadersAndRefusals(): void
    {
        $limiter = new ScriptedLimiter([self::ADMITTED, self::DENIED, self::BANNED]);
        $middleware = new RateLimit($limiter, '10/min');
        foreach ([[200, '9', '', 'hello'], [429, '0', '12', '"error":"rate_limited"'], [403, '', '5', '"error":"banned"']] as [$status, $remaining, $retryAfter, $body]) {
            $response = $middleware->process(self::request(), self::handler());
            self::assertSame([$status, $remaining, $retryAfter], [$response->getStatusCode(), $response->getHeaderLine('X-RateLimit-Remaining'), $response->getHeaderLine('Retry-After')]);
            self::assertStringContainsString($body, (string) $response->getBody());
            self::assertSame($status === 200 ? '' : 'no-store', $response->getHeaderLine('Cache-Control'));
        }
    }

    public function testRefusalIsAProblemIfTheRequestAsksForIt(): void
    {
        $middleware = new RateLimit(new ScriptedLimiter([self::DENIED, self::DENIED]), '10/min');
        $response = $middleware->process(self::request(headers: ['Accept' => ['text/html', 'application/problem+json']]), self::handler());
        self::assertSame([429, 'application/problem+json'], [$response->getStatusCode(), $response->getHeaderLine('Content-Type')]);
        $problem = json_decode((string) $response->getBody(), true);
        self::assertSame(['Quota exceeded', 429, ['per-minute'], 12], [$problem['title'], $problem['status'], $problem['violated-policies'], $problem['retry_after']]);
        $response = $middleware->process(self::request(headers: ['Accept' => '*/*']), self::handler());
        self::assertSame('application/json', $response->getHeaderLine('Content-Type'));
    }

    public function testKeyOfARequest(): void
    {
        $byUser = static fn (ServerRequestInterface $request): string => $request->getHeaderLine('X-User');
        $cases = [
            [[], self::request('203.0.113.9', ['X-Forwarded-For' => '6.6.6.6']), 'ip:203.0.113.9'],
            [[], self::request('2001:db8:1:2::5'), 'ip:2001:db8:1:2::/64'],
            [['trustedProxies' => ['10.0.0.0/8']], self::request('10.0.0.1', ['X-Forwarded-For' => ['6.6.6.6', '198.51.100.7, 10.0.0.2']]), 'ip:198.51.100.7'],
            [['trustedProxies' => ['10.0.0.1'], 'forwardingHeader' => 'cf-connecting-ip'], self::request('10.0.0.1', ['CF-Connecting-IP' => '198.51.100.7']), 'ip:198.51.100.7'],
            [['key' => $byUser], self::request('203.0.113.9', ['X-User' => '42']), '42'],
            [['key' => $byUser], self::request(), 'ip:203.0.113.9'],
        ];
        foreach ($cases as [$options, $request, $key]) {
            $limiter = new ScriptedLimiter([self::ADMITTED]);
            (new RateLimit($limiter, '10/min', ...$options))->process($request, self::handler());
            self::assertSame($key, $limiter->demands[0]->key);
        }
    }

    public function testUnitsAreRefundedByTheEndingOfTheResponse(): void
    {
        foreach ([['failure', 404, 1], ['failure', 200, 0], ['failure', 0, 1], ['success', 200, 1], ['success', 500, 0], [null, 500, 0]] as [$ending, $status, $refunds]) {
            $limiter = new ScriptedLimiter([self::ADMITTED]);
            try {
                (new RateLimit($limiter, '10/min', refundOn: $ending))->process(self::request(), self::handler($status));
            } catch (\LogicException) {
                self::assertSame(0, $status);
            }
            self::assertSame([$refunds, $ending !== null], [$limiter->refunds, $limiter->isRefundable]);
        }
    }

    public function testClientThatDisconnectsWithinItsBodyGetsNothingBack(): void
    {
        $upload = static fn (int $error): UploadedFileInterface => new UploadedFile('', 0, $error);
        $json = ['Content-Type' => 'application/json'];
        $multipart = ['Content-Type' => 'multipart/form-data; boundary=B', 'Content-Length' => '100'];
        $cases = [
            'complete' => ['body', $json + ['Content-Length' => '4'], [], 500, 1],
            'ends early' => ['half', $json + ['Content-Length' => '8'], [], 500, 0],
            'ends early, and is a 400' => ['half', $json + ['Content-Length' => '8'], [], 400, 0],
            'never begins' => ['', $json + ['Content-Length' => '8'], [], 400, 0],
            'complete, but too slow' => ['body', ['Content-Length' => '4'], [], 408, 1],
            'unknown length' => ['part', ['Transfer-Encoding' => 'chunked'], [], 400, 1],
            'unknown length, and too slow' => ['part', ['Transfer-Encoding' => 'chunked'], [], 408, 0],
            'no body, and too slow' => ['', [], [], 408, 1],
            // PHP does not keep the body of a form with files.
            'complete upload' => ['', $multipart, ['files' => [$upload(UPLOAD_ERR_NO_FILE)]], 500, 1],
            'upload ends early' => ['', $multipart, ['files' => ['a' => $upload(UPLOAD_ERR_NO_FILE), 'b' => [$upload(UPLOAD_ERR_PARTIAL)]]], 500, 0],
        ];
        foreach ($cases as $case => [$body, $headers, $files, $status, $refunds]) {
            $limiter = new ScriptedLimiter([self::ADMITTED]);
            $request = self::request(headers: $headers)->withMethod('POST')->withBody(Stream::create($body))->withUploadedFiles($files);
            (new RateLimit($limiter, '10/min', refundOn: 'failure'))->process($request, self::handler($status));
            self::assertSame($refunds, $limiter->refunds, $case);
        }
        // RoadRunner parses a form, and leaves its body empty.
        $limiter = new ScriptedLimiter([self::ADMITTED]);
        $request = self::request(headers: ['Content-Length' => '3'])->withParsedBody(['a' => '1']);
        (new RateLimit($limiter, '10/min', refundOn: 'failure'))->process($request, self::handler(500));
        self::assertSame(1, $limiter->refunds);

        // A body that can be read only once.
        foreach (['half' => 0, 'complete' => 1] as $text => $refunds) {
            [$reader, $writer] = (array) stream_socket_pair(STREAM_PF_UNIX, STREAM_SOCK_STREAM, 0);
            fwrite($writer, $text);
            fclose($writer);
            $limiter = new ScriptedLimiter([self::ADMITTED]);
            $request = self::request(headers: ['Content-Length' => '8'])->withBody(Stream::create($reader));
            self::assertFalse($request->getBody()->isSeekable());
            $request->getBody()->getContents();
            (new RateLimit($limiter, '10/min', refundOn: 'failure'))->process($request, self::handler(500));
            self::assertSame($refunds, $limiter->refunds, $text);
        }

        // The same with a handler that throws, refunds after success, and a handler that has read or closed the body.
        $request = self::request(headers: ['Content-Length' => '8'])->withBody(Stream::create('half'));
        foreach ([['failure', 0, false, 0], ['success', 200, false, 0], ['failure', 500, true, 1]] as [$ending, $status, $closes, $refunds]) {
            $limiter = new ScriptedLimiter([self::ADMITTED]);
            try {
                $request->getBody()->getContents();
                if ($closes) {
                    $request->getBody()->close();
                }
                (new RateLimit($limiter, '10/min', refundOn: $ending))->process($request, self::handler($status));
            } catch (\LogicException) {
                self::assertSame(0, $status);
            }
            self::assertSame($refunds, $limiter->refunds);
        }
    }

    /** A web server that passes on a body as it arrives is not part of PHP; its own one does not run the script. */
    public function testBuiltInServer(): void
    {
        $log = (string) tempnam(sys_get_temp_dir(), 'tidegate');
        $command = ['sh', '-c', 'exec "$0" -S 127.0.0.1:0 "$1" 2>&1', PHP_BINARY, __DIR__ . '/refunding_app.php'];
        $server = new Process($command, ['REFUNDING_APP_LOG' => $log]);
        $address = $server->awaitOutput('/http:\/\/(127\.0\.0\.1:\d+)/');
        $post = static function (string $path, string $body, int $length) use ($address) {
            $client = stream_socket_client("tcp://$address");
            self::assertNotFalse($client);
            fwrite($client, "POST $path HTTP/1.1\r\nHost: localhost\r\nContent-Length: $length\r\n\r\n$body");
            return $client;
        };
        $lines = static fn (): array => (array) file($log, FILE_IGNORE_NEW_LINES);

        $client = $post('/half', 'half', 8);
        stream_socket_shutdown($client, STREAM_SHUT_WR);
        self::assertSame('', stream_get_contents($client), 'the built-in server closes the connection');
        $client = $post('/whole', 'whole', 5);
        Servers::eventually('the second request', static fn (): bool => $lines() !== []);
        self::assertSame(['/whole 1'], $lines(), 'only this request runs the script');
        fclose($client);

        // The handler sends output until PHP notices that the client has disconnected.
        fclose($post('/stream', 'whole', 5));
        Servers::eventually('the last request', static fn (): bool => count($lines()) === 2);
        self::assertSame('/stream 0', $lines()[1]);
        $server->kill();
        unlink($log);
    }

    public function testRequestWithoutAnAddressIsRefused(): void
    {
        $response = (new RateLimit(new ScriptedLimiter([self::ADMITTED]), '10/min'))->process(self::request(''), self::handler());
        self::assertSame(400, $response->getStatusCode());
    }

    public function testInvalidOptionsAreRejected(): void
    {
        $limiter = new ScriptedLimiter([]);
        foreach ([[[]], ['ten'], ['10/min', 'trustedProxies' => ['x']], ['10/min', 'refundOn' => 'always']] as $arguments) {
            try {
                new RateLimit($limiter, ...$arguments);
                self::fail(json_encode($arguments) . ' is accepted');
            } catch (Invalid) {
                $this->addToAssertionCount(1);
            }
        }
    }

    public function testRulesRelayTheResponseOfTheService(): void
    {
        $log = (string) tempnam(sys_get_temp_dir(), 'tidegate');
        $admission = '{"allowed":true,"source":"store","limits":[],"response":{"headers":{"x-ratelimit-limit":"60"}},"receipt":"R2","refund_on":["failure"]}';
        [$service, $url] = Servers::fake('plain', 200, $admission, $log);
        $client = new Client($url, 30.0, logger: new MemoryLogger());
        $response = RateLimit::byRules($client)->process(self::request(headers: ['X-Api-Key' => 'k']), self::handler());
        self::assertSame([200, '60'], [$response->getStatusCode(), $response->getHeaderLine('X-RateLimit-Limit')]);
        RateLimit::byRules($client)->process(self::request(), self::handler(500));
        $lines = array_values(array_diff((array) file($log, FILE_IGNORE_NEW_LINES), ['connection']));
        unlink($log);
        self::assertSame('/v1/check {"request":{"method":"GET","path":"/a%20b","headers":[["host","example.com"],["x-api-key","k"]],"peer":"203.0.113.9"},"receipt":true}', $lines[0]);
        self::assertSame('/v1/refund {"receipt":"R2","status":500}', $lines[2]);
        self::assertCount(3, $lines, 'a success is not refunded');
        $service->kill();
        $response = RateLimit::byRules($client)->process(self::request(), self::handler());
        self::assertSame([200, ''], [$response->getStatusCode(), $response->getHeaderLine('X-RateLimit-Limit')], 'without the service');

        $denial = '{"allowed":false,"source":"store","limits":[],"error":"rate_limited","message":"m","retry_after":7,"retry_after_ms":7000,'
            . '"response":{"status":429,"headers":{"retry-after":"7","content-type":"text/plain"},"body":"slow down"}}';
        [$service, $url] = Servers::fake('plain', 429, $denial);
        $response = RateLimit::byRules(new Client($url, 30.0))->process(self::request(), self::handler());
        self::assertSame([429, '7', 'text/plain', 'slow down'], [$response->getStatusCode(), $response->getHeaderLine('Retry-After'), $response->getHeaderLine('Content-Type'), (string) $response->getBody()]);
    }
}
