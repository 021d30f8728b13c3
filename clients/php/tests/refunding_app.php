<?php

declare(strict_types=1);

// An application for `php -S` whose requests all fail. Appends the path of each and the number of refunds to the file in
// REFUNDING_APP_LOG. With the path `/stream`, it sends output until the client has disconnected.

namespace Tidegate\Tests;

use Nyholm\Psr7\Response;
use Nyholm\Psr7\ServerRequest;
use Nyholm\Psr7\Stream;
use Psr\Http\Message\ResponseInterface;
use Psr\Http\Message\ServerRequestInterface;
use Psr\Http\Server\RequestHandlerInterface;
use Tidegate\Psr15\RateLimit;

require __DIR__ . '/bootstrap.php';
require __DIR__ . '/ScriptedLimiter.php';

ignore_user_abort(true);
$limiter = new ScriptedLimiter([[1760000000000000, 1, 1, 9, 0, 60000000, 60000000, 0]]);
$handler = new class () implements RequestHandlerInterface {
    public function handle(ServerRequestInterface $request): ResponseInterface
    {
        while ($request->getUri()->getPath() === '/stream' && connection_aborted() === 0) {
            echo str_repeat('x', 65536);
            flush();
        }
        return new Response(500);
    }
};
$body = Stream::create(fopen('php://input', 'r'));
$request = new ServerRequest($_SERVER['REQUEST_METHOD'], $_SERVER['REQUEST_URI'], getallheaders(), $body, '1.1', $_SERVER);
(new RateLimit($limiter, '10/min', refundOn: 'failure'))->process($request, $handler);
file_put_contents((string) getenv('REFUNDING_APP_LOG'), "$_SERVER[REQUEST_URI] $limiter->refunds\n", FILE_APPEND);
