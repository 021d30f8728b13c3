<?php

declare(strict_types=1);

namespace Tidegate\Psr15;

use Psr\Http\Message\ResponseFactoryInterface;
use Psr\Http\Message\ResponseInterface;
use Psr\Http\Message\ServerRequestInterface;
use Psr\Http\Message\UploadedFileInterface;
use Psr\Http\Server\MiddlewareInterface;
use Psr\Http\Server\RequestHandlerInterface;
use Tidegate\Client;
use Tidegate\Decision;
use Tidegate\Exception\Invalid;
use Tidegate\Exception\TidegateException;
use Tidegate\Limit;
use Tidegate\Limiter;
use Tidegate\Response;
use Tidegate\TrustedProxies;

/**
 * Checks each request, by default counted by the client's address. Denials are answered with 429, bans with 403, and
 * failures by the limiter's onError. Rate-limit headers are set on every response. The request attribute `tidegate` is
 * the decision.
 */
final class RateLimit implements MiddlewareInterface
{
    public const ATTRIBUTE = 'tidegate';

    private const FACTORIES = [
        'Nyholm\Psr7\Factory\Psr17Factory',
        'GuzzleHttp\Psr7\HttpFactory',
        'Slim\Psr7\Factory\ResponseFactory',
        'Laminas\Diactoros\ResponseFactory',
        'HttpSoft\Message\ResponseFactory',
    ];

    private readonly TrustedProxies $proxies;
    private readonly ResponseFactoryInterface $responses;
    /** @var list<string> */
    private readonly array $limits;

    /**
     * @param string|list<string> $limits that each request must pass; empty for the rules of the service (see byRules)
     * @param ?\Closure(ServerRequestInterface): (string|int) $key the key that is counted; the client's address if it is
     *     null or returns an empty string
     * @param list<string> $trustedProxies networks of the proxies that report the client's address; none by default
     * @param string $forwardingHeader the one header in which they do
     * @param ?string $refundOn gives the units back if the response is a `success` (below 400) or a `failure`
     * @param ?ResponseFactoryInterface $responses for refusals; null for that of an installed PSR-7 implementation
     * @throws Invalid if an argument is not accepted, or there is no response factory
     */
    public function __construct(
        private readonly Limiter $limiter,
        string|array $limits,
        private readonly ?\Closure $key = null,
        array $trustedProxies = [],
        string $forwardingHeader = 'X-Forwarded-For',
        private readonly ?string $refundOn = null,
        ?ResponseFactoryInterface $responses = null,
    ) {
        $this->limits = array_values((array) $limits);
        if ($this->limits === [] && !$limiter instanceof Client) {
            throw new Invalid('expected at least one limit; only the service has rules');
        }
        array_map(Limit::parse(...), $this->limits);
        if (!in_array($refundOn, [null, 'success', 'failure'], true)) {
            throw new Invalid('refundOn must be success, failure or null');
        }
        $this->proxies = new TrustedProxies($trustedProxies, $forwardingHeader);
        $this->responses = $responses ?? self::installedFactory();
    }

    /** Creates middleware that checks requests by the rules of the service, and relays its refusals as they are. */
    public static function byRules(Client $client, ?ResponseFactoryInterface $responses = null): self
    {
        return new self($client, [], responses: $responses);
    }

    public function process(ServerRequestInterface $request, RequestHandlerInterface $handler): ResponseInterface
    {
        try {
            $decision = $this->decide($request);
        } catch (Invalid) {
            // Refused, so that a client cannot avoid being limited by sending a request that cannot be checked.
            $decision = new Decision(false, 'none', 'bad_request', response: new Response(
                400,
                ['content-type' => 'application/json', 'cache-control' => 'no-store'],
                '{"error":"bad_request","message":"the request cannot be checked"}',
            ));
        }
        if (!$decision->allowed) {
            $accept = $request->getHeaderLine('Accept');
            $response = self::withHeaders($this->responses->createResponse($decision->statusCode()), $decision->headers($accept));
            $response->getBody()->write($decision->body($accept));
            return $response;
        }
        $status = 500; // if the handler throws
        try {
            $response = $handler->handle($request->withAttribute(self::ATTRIBUTE, $decision));
            $status = $response->getStatusCode();
        } finally {
            $this->refund($decision, $request, $status);
        }
        return self::withHeaders($response, $decision->headers());
    }

    private function decide(ServerRequestInterface $request): Decision
    {
        $peer = $request->getServerParams()['REMOTE_ADDR'] ?? '';
        if ($this->limits === [] && $this->limiter instanceof Client) {
            $path = $request->getUri()->getPath();
            return $this->limiter->checkRequest($request->getMethod(), $path === '' ? '/' : $path, $request->getHeaders(), (string) $peer);
        }
        $key = $this->key === null ? '' : (string) ($this->key)($request);
        if ($key === '') {
            $lines = $request->getHeader($this->proxies->header());
            $key = TrustedProxies::subject($this->proxies->clientAddress((string) $peer, $lines));
        }
        return $this->limiter->check($key, $this->limits, refundable: $this->refundOn !== null);
    }

    /** Refunds the units if this status does so, but not if the client disconnected: the work may have been done. */
    private function refund(Decision $decision, ServerRequestInterface $request, int $status): void
    {
        $isByRules = $this->limits === [] && $this->limiter instanceof Client;
        $ending = $status < 400 ? 'success' : 'failure';
        if (!($isByRules ? $decision->refundsOn($status) : $this->refundOn === $ending) || self::isAborted($request, $status)) {
            return;
        }
        try {
            if ($isByRules) {
                $this->limiter->refundByStatus($decision, $status);
            } else {
                $this->limiter->refund($decision);
            }
        } catch (TidegateException $failure) {
            error_log('tidegate: units were not refunded: ' . $failure->getMessage());
        }
    }

    /** Returns whether the client disconnected, or was too slow with its body (408), as far as PHP knows. */
    private static function isAborted(ServerRequestInterface $request, int $status): bool
    {
        $isComplete = self::hasCompleteBody($request);
        return connection_aborted() !== 0 || $isComplete === false || ($isComplete === null && $status === 408);
    }

    /**
     * Returns whether the whole body of a request was received. False means that it ended early.
     *
     * Null means that this is unknown: the body has no `Content-Length`, was parsed by the server and not kept, is a
     * form with files of which none is partial, or cannot be read again: the handler has closed it, or has not read it to
     * its end. A body that can be read again is read to its end.
     */
    private static function hasCompleteBody(ServerRequestInterface $request): ?bool
    {
        $length = $request->getHeaderLine('Content-Length');
        if (!ctype_digit($length)) {
            return $request->hasHeader('Transfer-Encoding') ? null : true;
        }
        if (stripos($request->getHeaderLine('Content-Type'), 'multipart/form-data') === 0) {
            // PHP parses such a body before the script runs, and does not keep it.
            $isPartial = false;
            $files = $request->getUploadedFiles();
            array_walk_recursive($files, static function (UploadedFileInterface $file) use (&$isPartial): void {
                $isPartial = $isPartial || $file->getError() === UPLOAD_ERR_PARTIAL;
            });
            return $isPartial ? false : null;
        }
        $body = $request->getBody();
        try {
            if (!$body->isSeekable()) {
                return $body->eof() ? $body->tell() >= (int) $length : null;
            }
            $body->rewind();
            for ($read = 0; $read < (int) $length && ($data = $body->read(65536)) !== '';) {
                $read += strlen($data);
            }
            return $read === 0 && $request->getParsedBody() ? null : $read >= (int) $length;
        } catch (\RuntimeException) {
            return null; // the handler has closed the body
        }
    }

    /** @param array<string, string> $headers */
    private static function withHeaders(ResponseInterface $response, array $headers): ResponseInterface
    {
        foreach ($headers as $name => $value) {
            $response = $response->withHeader($name, $value);
        }
        return $response;
    }

    private static function installedFactory(): ResponseFactoryInterface
    {
        foreach (self::FACTORIES as $class) {
            if (class_exists($class)) {
                /** @var ResponseFactoryInterface */
                return new $class();
            }
        }
        throw new Invalid('no PSR-17 response factory is installed; pass one as responses');
    }
}
