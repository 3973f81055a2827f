// The values under the pointer. The page is complete without it.
function addCursors(){document.querySelectorAll('.plot').forEach(function(plot){
  var data=JSON.parse(plot.querySelector('script').textContent),cursor=plot.querySelector('.cursor');
  function text(v){return v===0?'0':Math.abs(v)>=1e4?Math.round(v).toLocaleString('en'):String(+v.toPrecision(4))}
  function near(p,x){var a=0,b=p.length-1;while(b-a>1){var m=(a+b)>>1;if(p[m][0]<x)a=m;else b=m}
    return Math.abs(p[a][0]-x)<=Math.abs(p[b][0]-x)?p[a]:p[b]}
  function move(e){
    var box=plot.getBoundingClientRect(),share=Math.min(1,Math.max(0,(e.clientX-box.left)/box.width));
    var wanted=data.left+share*(data.right-data.left),best=null,card=document.createElement('div');
    data.series.forEach(function(s){var p=near(s.p,wanted);
      if(best===null||Math.abs(p[0]-wanted)<Math.abs(best-wanted))best=p[0]});
    if(best===null)return;
    card.appendChild(document.createTextNode(data.x+' '+text(best)));
    data.series.forEach(function(s){var p=near(s.p,best);
      if(Math.abs(p[0]-best)>(data.right-data.left)/50)return;
      var row=document.createElement('div'),dot=document.createElement('i');
      row.style.all='unset';row.style.display='block';dot.className='s'+s.c;row.appendChild(dot);
      row.appendChild(document.createTextNode(s.n+'  '+text(p[1])));card.appendChild(row)});
    cursor.replaceChildren(card);cursor.hidden=false;
    var at=(best-data.left)/(data.right-data.left);cursor.style.left=100*at+'%';cursor.classList.toggle('flip',at>.55)}
  plot.addEventListener('pointermove',move);plot.addEventListener('pointerdown',move);
  plot.addEventListener('pointerleave',function(){cursor.hidden=true})});}
addCursors();
