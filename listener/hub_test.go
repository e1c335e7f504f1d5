package listener_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/listener"
)

func wake(outbox string, hash uint64) engine.Wake { return engine.Wake{Outbox: outbox, Hash: hash} }

func TestHubWakesTheEnginesOfTheOutbox(t *testing.T) {
	t.Parallel()
	sent := make(chan []engine.Wake, 1)
	sender := listener.NewSender(func(_ context.Context, wakes []engine.Wake) error {
		sent <- wakes
		return nil
	}, nil)
	hub := listener.NewHub(sender)
	var orders, both []engine.Wake
	detachOrders := hub.Attach([]string{"orders"}, func(w engine.Wake) { orders = append(orders, w) })
	detachBoth := hub.Attach([]string{"mails", "orders"}, func(w engine.Wake) { both = append(both, w) })

	hub.Committed([]engine.Wake{wake("orders", 1), wake("mails", 2), wake("audit", 3)})
	if want := []engine.Wake{wake("orders", 1)}; !slices.Equal(orders, want) {
		t.Errorf("the engine of orders got %v, want %v", orders, want)
	}
	if want := []engine.Wake{wake("orders", 1), wake("mails", 2)}; !slices.Equal(both, want) {
		t.Errorf("the engine of both got %v, want %v", both, want)
	}
	if got, want := <-sent, []engine.Wake{wake("audit", 3)}; !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}

	detachBoth()
	detachBoth() // does nothing
	hub.Committed([]engine.Wake{wake("orders", 4), wake("mails", 5)})
	if len(orders) != 2 || len(both) != 2 {
		t.Errorf("after one detached, the engines have got %v and %v", orders, both)
	}
	if got, want := <-sent, []engine.Wake{wake("mails", 5)}; !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}

	detachOrders()
	hub.Committed([]engine.Wake{wake("orders", 6)})
	if got, want := <-sent, []engine.Wake{wake("orders", 6)}; !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
}

func TestHubWithoutSender(t *testing.T) {
	t.Parallel()
	var hub listener.Hub
	hub.Committed([]engine.Wake{wake("orders", 1)}) // nobody to tell
	var got []engine.Wake
	defer hub.Attach([]string{"orders"}, func(w engine.Wake) { got = append(got, w) })()
	hub.Committed([]engine.Wake{wake("orders", 2)})
	if want := []engine.Wake{wake("orders", 2)}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// After detach has returned, the engine may free what its wake uses.
func TestHubDetachIsFinal(t *testing.T) {
	t.Parallel()
	var hub listener.Hub
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 200 {
				var gone atomic.Bool
				detach := hub.Attach([]string{"orders"}, func(engine.Wake) {
					if gone.Load() {
						t.Error("woken after detach")
					}
				})
				hub.Committed([]engine.Wake{wake("orders", 1)})
				detach()
				gone.Store(true)
			}
		})
	}
	wg.Wait()
}
