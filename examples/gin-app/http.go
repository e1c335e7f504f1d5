package main

import (
	"context"
	_ "embed" // for the page
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	"go.uber.org/zap"
	"gorm.io/gorm"
)

//go:embed page.html
var page []byte

// contentPolicy lets the page do no more than it needs.
const contentPolicy = "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"

// maxBody bounds the body of a request, in bytes.
const maxBody = 16 << 10

// keepAlive is the time between two signs of life on a stream of events, for
// proxies that end connections on which nothing happens.
const keepAlive = 15 * time.Second

// api answers requests. Its handlers know nothing of transactions: they answer
// when an operation of Orders has returned, and so never before the commit.
type api struct {
	orders  Orders
	journal *Journal
	ready   func(context.Context) error
	closing context.Context // its end ends the streams of events
	log     *zap.Logger
}

func (a *api) handler() *gin.Engine {
	r := gin.New()
	r.HandleMethodNotAllowed = true
	r.Use(gin.CustomRecoveryWithWriter(nil, a.recovered))
	r.GET("/", a.page)
	r.POST("/orders", a.place)
	r.GET("/orders/:id", a.find)
	r.DELETE("/orders/:id", a.cancel)
	r.GET("/events", a.events)
	r.GET("/healthz", a.health)
	r.NoRoute(func(c *gin.Context) { reject(c, http.StatusNotFound, "there is no "+c.Request.URL.Path) })
	r.NoMethod(func(c *gin.Context) { reject(c, http.StatusMethodNotAllowed, "not with "+c.Request.Method) })
	return r
}

func (a *api) page(c *gin.Context) {
	c.Header("Content-Security-Policy", contentPolicy)
	c.Data(http.StatusOK, "text/html; charset=utf-8", page)
}

func (a *api) place(c *gin.Context) {
	order, err := parseOrder(http.MaxBytesReader(c.Writer, c.Request.Body, maxBody))
	if err != nil {
		a.fail(c, err)
		return
	}
	if err := a.orders.Place(c.Request.Context(), &order); err != nil {
		a.fail(c, err)
		return
	}
	c.Header("Location", fmt.Sprintf("/orders/%d", order.ID))
	c.JSON(http.StatusCreated, order)
}

func (a *api) find(c *gin.Context) {
	id, err := parseID(c.Param("id"))
	if err != nil {
		a.fail(c, err)
		return
	}
	order, err := a.orders.Find(c.Request.Context(), id)
	if err != nil {
		a.fail(c, err)
		return
	}
	c.JSON(http.StatusOK, order)
}

func (a *api) cancel(c *gin.Context) {
	id, err := parseID(c.Param("id"))
	if err != nil {
		a.fail(c, err)
		return
	}
	if err := a.orders.Cancel(c.Request.Context(), id); err != nil {
		a.fail(c, err)
		return
	}
	c.Status(http.StatusNoContent)
}

// events streams the journal: first what it remembers, then every change.
func (a *api) events(c *gin.Context) {
	c.Header("Content-Type", "text/event-stream")
	c.Header("Cache-Control", "no-store")
	c.Header("X-Accel-Buffering", "no") // or nginx keeps it back
	alive := time.NewTicker(keepAlive)
	defer alive.Stop()
	for seen := 0; ; {
		entries, last, changed := a.journal.Since(seen)
		for _, e := range entries {
			if writeEvent(c.Writer, e) != nil {
				return // the client has gone
			}
		}
		c.Writer.Flush()
		seen = last
		select {
		case <-changed:
		case <-alive.C:
			if _, err := io.WriteString(c.Writer, ": alive\n\n"); err != nil {
				return
			}
		case <-c.Request.Context().Done():
			return
		case <-a.closing.Done():
			return
		}
	}
}

func writeEvent(w io.Writer, e Entry) error {
	data, err := json.Marshal(e)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "data: %s\n\n", data)
	return err
}

func (a *api) health(c *gin.Context) {
	if err := a.ready(c.Request.Context()); err != nil {
		a.log.Warn("not healthy", zap.Error(err))
		reject(c, http.StatusServiceUnavailable, "the database is not ready")
		return
	}
	c.JSON(http.StatusOK, gin.H{"status": "ok"})
}

// fail answers with what err means to the client, and logs what is not the
// client's doing.
func (a *api) fail(c *gin.Context, err error) {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, new(inputError)):
		reject(c, http.StatusBadRequest, err.Error())
	case errors.As(err, &tooLarge):
		reject(c, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit))
	case errors.Is(err, gorm.ErrRecordNotFound):
		reject(c, http.StatusNotFound, "there is no such order")
	case c.Request.Context().Err() != nil:
		c.Abort() // nobody waits for an answer
	default:
		a.log.Error("request failed", zap.String("path", c.Request.URL.Path), zap.Error(err))
		reject(c, http.StatusInternalServerError, "the server could not do this; its log says why")
	}
}

func (a *api) recovered(c *gin.Context, cause any) {
	a.log.Error("handler panicked", zap.String("path", c.Request.URL.Path), zap.Any("cause", cause), zap.Stack("stack"))
	reject(c, http.StatusInternalServerError, "the server could not do this; its log says why")
}

func reject(c *gin.Context, status int, reason string) {
	c.AbortWithStatusJSON(status, gin.H{"error": reason})
}
