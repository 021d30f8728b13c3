// An API whose callers have plans. The rules are in tidegate.toml, the keys in keys.toml:
//
//	tidegate serve --config tidegate.toml
//	go run .
//	curl -i -H 'x-api-key: demo-free-key' http://127.0.0.1:3002/v1/hello
package main

import (
	"cmp"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"tidegate"
)

func main() {
	// The default deadline of 50 ms suits a service on the same machine; this example also runs on busy ones.
	client := tidegate.New(cmp.Or(os.Getenv("TIDEGATE_URL"), "http://127.0.0.1:8080"), tidegate.WithDeadline(time.Second))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/hello", func(w http.ResponseWriter, r *http.Request) {
		if decision, ok := tidegate.FromContext(r.Context()); ok && len(decision.Limits) > 0 {
			fmt.Fprintf(w, "hello, %d of %d left\n", decision.Remaining, decision.Limit)
			return
		}
		fmt.Fprintln(w, "hello")
	})
	listener, err := net.Listen("tcp", "127.0.0.1:"+cmp.Or(os.Getenv("PORT"), "3002"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, tidegate.RulesMiddleware(client)(mux)))
}
